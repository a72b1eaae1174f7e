"""A zoo of models from torch.export, with what eager PyTorch computes for them, for the tests of penstock/program.

    zoo.py write DIR [--only NAME …]

Writes zoo.json, the list of the names, and for each model

    NAME.pt2                   the exported program, with the shapes of one microbatch, or dynamic ones
    NAME.inputs.safetensors    the inputs of all microbatches
    NAME.expected.safetensors  outputs, gradients and buffers of the original module
    NAME.json                  how to run it, and where to cut it

Inputs are named by their path, args.0, args.0.1, kwargs.batch.ids; those of the microbatches are joined along dimension
0, and those without dimensions are stacked to [M]. None and Python constants are left out.

What is expected comes from a fresh copy of the module, which runs the microbatches one after the other without an
optimizer's step:

    output.I    the I-th output in the order of torch.utils._pytree, joined like the inputs; an integer is int64 [M];
                None is left out
    grad.NAME   of each parameter that has a gradient, a tied one under each of its names
    buffer.NAME after the last microbatch

A microbatch's loss is the sum of the means of its floating-point outputs, each mean taken in the output's dtype and
then made float32. Gradients are those of the mean of the M losses, accumulated from (loss / M).backward().

In NAME.json:

    name, microbatches  M
    mode                "train", or "eval" where the expected values are those of model.eval(). The program has been
                        exported in training mode all the same, except for eval_exported.
    tolerance           the largest difference allowed, as a part of the tensor's largest absolute value or of 1,
                        whichever is larger
    outputs             how many there are, with None and integers
    shared              lists of names that are one parameter
    dynamic             whether sizes are symbolic; then the inputs have other sizes than the exported example
    cuts                where to cut: "at" lists modules, each called once, NAME to cut before it and NAME:end to cut
                        after it; "stages" is how many come out, "why" what it is to show. With "marks" the cuts are
                        the program's pipe_split() nodes, and stages that are empty do not count.

Every gradient is ten times the tolerance at least, so that one that is missing is seen. Each program is read back, its
cuts are looked up, and it must compute the same as the module.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import operator
import pathlib
import sys
import time
import typing
import warnings
import zlib

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
warnings.filterwarnings("ignore", message="The tensor attributes self.lstm._flat_weights")
warnings.filterwarnings("ignore", message="`isinstance.treespec, LeafSpec.` is deprecated")

import safetensors  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import pipe_split  # noqa: E402
from torch.export import Dim  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

MICROBATCHES = 4
BATCH = Dim("batch")


@dataclasses.dataclass
class Entry:
    model: typing.Callable[[], nn.Module]
    # One microbatch at random: (args, kwargs). Its parameters, if any, are sizes.
    inputs: typing.Callable[..., tuple[tuple, dict]]
    # (modules to cut at, why)
    cuts: list[tuple[list[str], str]]
    # How many stages the model's pipe_split() marks make.
    marks: int = 0
    mode: str = "train"
    tolerance: float = 1e-5
    # torch.export's dynamic_shapes, and the sizes for `inputs` of the example that is exported.
    dynamic: dict | None = None
    example: dict = dataclasses.field(default_factory=dict)
    exported_mode: str = "train"
    functionalized: bool = False
    # Parameters that get no gradient.
    unused: tuple[str, ...] = ()


ZOO: dict[str, Entry] = {}


def entry(name, inputs, cuts, **options):
    """Puts the class or function that makes a model into the zoo. It may be there under several names."""

    def put(model):
        assert name not in ZOO
        ZOO[name] = Entry(model, inputs, cuts, **options)
        return model

    return put


def features(*shape):
    """Inputs of models that take one tensor."""
    return lambda: ((torch.randn(*shape),), {})


def tokens(rows=2, length=6):
    return (torch.randint(0, 32, (rows, length)),), {}


@entry(
    "mlp",
    features(3, 16),
    [
        (["layers.2"], "in the middle"),
        (["layers.1", "layers.3"], "three stages"),
        (["layers.1", "layers.2", "head"], "four stages"),
        (["layers.1:end"], "after a module, so that its tanh goes to the next stage"),
        (["layers.0:end", "layers.2", "head"], "both kinds at once"),
    ],
)
class Mlp(nn.Module):
    """Linear layers one after the other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


CONVNET_CUTS = [
    (["body.3"], "in the middle of a Sequential"),
    (["body.1", "body.4"], "each BatchNorm in another stage"),
    (["body.1", "body.3", "head"], "four stages"),
    (["body.1:end"], "between a BatchNorm and its ReLU"),
]


@entry("functionalized", features(4, 3, 8, 8), CONVNET_CUTS, functionalized=True)
@entry("convnet", features(4, 3, 8, 8), CONVNET_CUTS)
class ConvNet(nn.Module):
    """BatchNorm in training mode: its statistics are buffers that each microbatch changes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, bias=False),
            nn.BatchNorm2d(12, momentum=0.3),
            nn.ReLU(),
        )
        self.head = nn.Linear(12, 4)

    def forward(self, images):
        x = F.adaptive_avg_pool2d(self.body(images), 1).flatten(1)
        return torch.tanh(self.head(x))


class ConvolutionBlock(nn.Module):
    def __init__(self, channels_in, channels):
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, channels)

    def forward(self, x):
        return F.silu(self.norm(self.convolution(x)))


@entry(
    "unet",
    features(2, 3, 16, 16),
    [
        (["middle"], "both skips cross the one border"),
        (["down1", "up1"], "a skip of each length"),
        (["down1", "middle", "up0"], "a skip over two stages"),
        (["up1:end"], "the inner skip ends where the cut is"),
        (["up1.block"], "inside a module, after its skip was joined"),
    ],
)
class UNet(nn.Module):
    """Skips from the way down to the way up."""

    class Up(nn.Module):
        def __init__(self, channels_in, channels):
            super().__init__()
            self.grow = nn.ConvTranspose2d(channels_in, channels, 2, stride=2)
            self.block = ConvolutionBlock(2 * channels, channels)

        def forward(self, x, skip):
            return self.block(torch.cat([self.grow(x), skip], dim=1))

    def __init__(self):
        super().__init__()
        self.down0 = ConvolutionBlock(3, 8)
        self.down1 = ConvolutionBlock(8, 12)
        self.middle = ConvolutionBlock(12, 16)
        self.up1 = UNet.Up(16, 12)
        self.up0 = UNet.Up(12, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, images):
        skip0 = self.down0(images)
        skip1 = self.down1(F.max_pool2d(skip0, 2))
        x = self.middle(F.avg_pool2d(skip1, 2))
        x = self.up1(x, skip1)
        x = self.up0(x, skip0)
        return self.head(x)


@entry(
    "resnet",
    features(3, 3, 12, 12),
    [
        (["layer2"], "between blocks"),
        (["layer1.1", "layer2.1"], "between blocks, three stages"),
        (["layer1.1.conv2"], "inside a block: its residual crosses the border"),
        (["layer2.0.downsample"], "before the residual's own convolution: its input crosses, and the sum's other part"),
        (["layer1.0.bn1", "layer2.0", "fc"], "four stages"),
    ],
)
class ResNet(nn.Module):
    """Residual blocks, with ReLU and sum in place as torchvision writes them."""

    class Block(nn.Module):
        def __init__(self, channels_in, channels, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(channels)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(channels)
            self.downsample = None
            if stride != 1 or channels_in != channels:
                self.downsample = nn.Sequential(
                    nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
                )

        def forward(self, x):
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += x if self.downsample is None else self.downsample(x)
            return self.relu(out)

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(ResNet.Block(8, 8, 1), ResNet.Block(8, 8, 1))
        self.layer2 = nn.Sequential(ResNet.Block(8, 12, 2), ResNet.Block(12, 12, 1))
        self.fc = nn.Linear(12, 4)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images)), inplace=True), 3, stride=2, padding=1)
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class Attention(nn.Module):
    """Of x to itself, or to a memory."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, memory=None, mask=None, causal=False):
        key, value = self.key_value(x if memory is None else memory).chunk(2, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query(x), key, value)
        )
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Causal without a mask."""

    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x, mask=None):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask, causal=mask is None))
        return x + self.dropout(self.mlp(self.norm2(x)))


GPT_CUTS = [
    (["blocks.1"], "the tied embedding is in the first stage and in the last"),
    (["blocks.1", "blocks.2"], "one block a stage; the middle stage has no part of the tied embedding"),
    (["blocks.0", "blocks.2", "norm"], "the embedding and the head alone"),
    (["blocks.1.mlp"], "inside a block: the residual crosses the border"),
    (["head"], "a last stage that has nothing but the tied weight"),
]


@entry(
    "gpt_dynamic",
    functools.partial(tokens, rows=3, length=9),
    GPT_CUTS,
    mode="eval",
    dynamic={"ids": {0: BATCH, 1: Dim("length", max=16)}},
    example={"rows": 2, "length": 6},
)
@entry("gpt", tokens, GPT_CUTS, mode="eval")
class Gpt(nn.Module):
    """Its head is tied to its embedding; dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.position = nn.Embedding(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(TransformerBlock(16, 2, dropout=0.1) for _ in range(3))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.embedding(ids) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sentences():
    """A source, a target, and which tokens of the source are not padding."""
    lengths = torch.randint(2, 6, (3, 1))
    return (torch.randint(0, 32, (3, 5)), torch.randint(0, 32, (3, 4))), {"present": torch.arange(5) < lengths}


@entry(
    "encoder_decoder",
    sentences,
    [
        (["decoder.0"], "memory and masks cross the border"),
        (["encoder.1", "decoder.0"], "the target is first used in the last stage"),
        (["decoder.0", "decoder.1"], "each decoder layer in its own stage: the memory goes to both"),
        (["encoder.1", "decoder.0", "decoder.1"], "four stages; the padding mask goes to all of them"),
        (["decoder.0.cross_attention"], "inside a layer, before it uses the memory"),
    ],
)
class EncoderDecoder(nn.Module):
    """All decoder layers attend to the memory, under a mask for the padding and a causal one."""

    class DecoderLayer(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.self_block = TransformerBlock(width, heads)
            self.cross_norm = nn.LayerNorm(width)
            self.cross_attention = Attention(width, heads)

        def forward(self, x, memory, causal, present):
            x = self.self_block(x, mask=causal)
            return x + self.cross_attention(self.cross_norm(x), memory=memory, mask=present)

    def __init__(self):
        super().__init__()
        self.source_embedding = nn.Embedding(32, 16)
        self.target_embedding = nn.Embedding(32, 16)
        self.encoder = nn.ModuleList(TransformerBlock(16, 2) for _ in range(2))
        self.decoder = nn.ModuleList(EncoderDecoder.DecoderLayer(16, 2) for _ in range(2))
        self.head = nn.Linear(16, 8)

    def forward(self, source, target, *, present):
        present = present[:, None, None, :]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        memory = self.source_embedding(source)
        for layer in self.encoder:
            memory = layer(memory, mask=present)
        x = self.target_embedding(target)
        for layer in self.decoder:
            x = layer(x, memory, causal, present)
        return self.head(x)


@entry(
    "lstm",
    features(2, 5, 8),
    [
        (["lstm"], "its initial state is made in the stage that runs it"),
        (["lstm", "lstm:end"], "the LSTM alone"),
        (["widen:end", "lstm", "narrow"], "four stages"),
        (["narrow"], "the last state crosses beside the sequence"),
    ],
)
class Lstm(nn.Module):
    """One node that takes lists of tensors and has three outputs."""

    def __init__(self):
        super().__init__()
        self.widen = nn.Linear(8, 12)
        self.lstm = nn.LSTM(12, 12, num_layers=2, batch_first=True)
        self.narrow = nn.Linear(12, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = torch.tanh(self.widen(x))
        sequence, (hidden, _) = self.lstm(x)
        return self.head(torch.relu(self.narrow(sequence))), hidden[-1]


def dense_mixture(experts, x, probabilities):
    """Every expert sees every token; the two best count."""
    weights, chosen = probabilities.topk(2, dim=-1)
    gates = (F.one_hot(chosen, len(experts)).to(x.dtype) * weights.unsqueeze(-1)).sum(1)
    answers = torch.stack([expert(x) for expert in experts], dim=1)
    return (answers * gates.unsqueeze(-1)).sum(1)


def capacity_mixture(experts, x, probabilities):
    """Every expert takes the four tokens that want it most."""
    weights, chosen = probabilities.t().topk(4, dim=1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = x.gather(0, chosen[number].unsqueeze(1).expand(-1, x.shape[1]))
        out = out.index_add(0, chosen[number], expert(rows) * weights[number].unsqueeze(1))
    return out


def dropless_mixture(experts, x, probabilities):
    """Every expert sees the tokens that chose it, whose number only the data knows."""
    weights, chosen = probabilities.topk(2, dim=-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)
        out = out.index_add(0, token, expert(x[token]) * weights[token, place].unsqueeze(1))
    return out


class Moe(nn.Module):
    """A mixture of experts. The balance of its layers is summed up to the second output, which has no dimensions."""

    class Layer(nn.Module):
        def __init__(self, mixture):
            super().__init__()
            self.mixture = mixture
            self.router = nn.Linear(12, 3)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU()) for _ in range(3))

        def forward(self, x):
            tokens = x.reshape(-1, x.shape[-1])
            probabilities = self.router(tokens).softmax(-1)
            favourite = F.one_hot(probabilities.argmax(-1), 3).to(x.dtype)
            balance = 3 * (favourite.mean(0) * probabilities.mean(0)).sum()
            return x + self.mixture(self.experts, tokens, probabilities).view_as(x), balance

    def __init__(self, mixture):
        super().__init__()
        self.enter = nn.Linear(8, 12)
        self.layers = nn.ModuleList(Moe.Layer(mixture) for _ in range(2))
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.enter(x)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.head(x), torch.stack(balances).sum()


for moe_name, moe_mixture in [
    ("moe", dense_mixture),
    ("moe_capacity", capacity_mixture),
    ("moe_dropless", dropless_mixture),
]:
    entry(
        moe_name,
        features(2, 4, 8),
        [
            (["layers.1"], "the first layer's balance crosses the border to the end"),
            (["layers.0", "layers.1"], "one layer a stage"),
            (["layers.0", "layers.1", "head"], "both balances go to the head's stage"),
            (["layers.0.experts.1"], "between the experts of a layer: what the router chose crosses the border"),
        ],
    )(functools.partial(Moe, moe_mixture))


def arguments_of_every_kind():
    kwargs = {
        "pair": (torch.randn(3, 8), [torch.randn(3, 8), None]),
        "batch": {"weights": torch.rand(3, 1), "ids": torch.randint(0, 16, (3,))},
        "unused": torch.randn(3, 2),
    }
    return (torch.randn(3, 8), None, 3), kwargs


@entry(
    "kwargs_none",
    arguments_of_every_kind,
    [
        (["second"], "the embedding's ids enter at the second stage"),
        (["second", "third"], "every stage has inputs of its own"),
        (["second", "third", "head"], "four stages, with outputs from each of them"),
        (["head"], "an output for the end and one that crosses"),
    ],
)
class KwargsNone(nn.Module):
    """Keyword arguments, None, a Python integer, an input without use, nested inputs and outputs, an input returned."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.embedding = nn.Embedding(16, 8)
        self.third = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x, mask=None, times=1, *, pair, batch, unused):
        if mask is not None:
            x = x * mask
        first = torch.tanh(self.first(x)) * times
        second = torch.tanh(self.second(first + pair[0])) + self.embedding(batch["ids"])
        third = torch.tanh(self.third(second * batch["weights"]))
        if pair[1][1] is None:
            third = third + pair[1][0]
        return {
            "logits": self.head(third),
            "hidden": (first, [second, None]),
            "count": times + 4,
            "again": batch["ids"],
        }


def sizes(rows=3, length=7, notes=5):
    return (torch.randint(0, 32, (rows, length)), torch.randn(rows, notes)), {}


@entry(
    "dynamic",
    sizes,
    [
        (["mix"], "sizes cross the border"),
        (["position", "fold"], "sizes from the first stage are used in the last one only"),
        (["position", "mix", "fold"], "four stages"),
        (["note"], "an input of the last stage, whose size the graph takes at its very top"),
        (["fold.inner"], "between a view and the one that undoes it"),
    ],
    dynamic={"ids": {0: BATCH, 1: Dim("length", min=3, max=64)}, "notes": {0: BATCH, 1: Dim("notes")}},
    example={"rows": 2, "length": 6, "notes": 4},
)
class Dynamic(nn.Module):
    """Symbolic batch and sequence sizes, with arithmetic on them late and in the outputs."""

    class Position(nn.Module):
        def __init__(self):
            super().__init__()
            self.frequency = nn.Parameter(torch.rand(12))

        def forward(self, x):
            at = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
            return x + torch.sin(at.unsqueeze(1) * self.frequency)

    class Fold(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, 6)

        def forward(self, x, batch, length):
            rows = torch.tanh(self.inner(x.reshape(batch * length, -1)))
            return rows.view(batch, length, 6) * torch.full((batch, length, 1), 0.5)

    class Note(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(1, 6)

        def forward(self, x, notes):
            average = notes.sum(1, keepdim=True) / notes.shape[1]
            return x + self.scale(average).unsqueeze(1).expand(-1, x.shape[1], -1)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 12)
        self.position = Dynamic.Position()
        self.mix = nn.Linear(12, 12)
        self.fold = Dynamic.Fold()
        self.note = Dynamic.Note()

    def forward(self, ids, notes):
        batch, length = ids.shape
        x = self.position(self.embedding(ids))
        x = x + torch.relu(self.mix(x)) / length
        x = self.fold(x, batch, length)
        x = self.note(x, notes)
        return x, x[:, 1:].sum(1), length // 2 + 1, notes.shape[1], batch


@entry(
    "bfloat16",
    lambda: ((torch.randn(2, 4, 16, dtype=torch.bfloat16),), {}),
    [
        (["blocks.1"], "bfloat16 crosses the border"),
        (["blocks.0.mlp", "blocks.1"], "three stages"),
        (["blocks.0.norm2", "blocks.1", "head"], "four stages"),
    ],
    tolerance=2e-2,
)
class Bfloat16(nn.Module):
    """A transformer in bfloat16. What it returns is scaled up so that its gradients stand out from the rounding.

    No product takes more than 4,096 multiplications: larger ones go to oneDNN, which dies of an illegal instruction on
    virtual machines that announce AMX and do not let it run.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TransformerBlock(16, 2) for _ in range(2))
        self.head = nn.Linear(16, 4)
        self.to(torch.bfloat16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.head(x)) * 256


@entry(
    "gqa",
    tokens,
    [
        (["blocks.1"], "the rotation crosses the border; both stages have the mask's buffer"),
        (["blocks.0", "blocks.1"], "rotation and blocks apart"),
        (["blocks.0", "blocks.1", "head"], "four stages"),
        (["blocks.0.attention.out"], "inside the attention"),
    ],
)
class Gqa(nn.Module):
    """Grouped queries, rotary embeddings from buffers that are not persistent, a causal mask that is one."""

    class Rotary(nn.Module):
        def __init__(self, width, longest):
            super().__init__()
            angles = torch.outer(torch.arange(longest), 100 ** -(torch.arange(0, width, 2) / width)).repeat(1, 2)
            self.register_buffer("cosine", angles.cos(), persistent=False)
            self.register_buffer("sine", angles.sin(), persistent=False)

        def forward(self, length):
            return self.cosine[:length], self.sine[:length]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(16, 16, bias=False)
            self.key = nn.Linear(16, 8, bias=False)
            self.value = nn.Linear(16, 8, bias=False)
            self.out = nn.Linear(16, 16, bias=False)

        @staticmethod
        def rotated(x, rotation):
            cosine, sine = rotation
            left, right = x.chunk(2, dim=-1)
            return x * cosine + torch.cat([-right, left], dim=-1) * sine

        def forward(self, x, rotation, allowed):
            length = x.shape[1]
            query, key, value = (
                part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)
            )
            query, key = self.rotated(query, rotation), self.rotated(key, rotation)
            mask = allowed[:length, :length]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
            return self.out(attended.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.RMSNorm(16)
            self.attention = Gqa.Attention()
            self.norm2 = nn.RMSNorm(16)
            self.gate = nn.Linear(16, 24, bias=False)
            self.up = nn.Linear(16, 24, bias=False)
            self.down = nn.Linear(24, 16, bias=False)

        def forward(self, x, rotation, allowed):
            x = x + self.attention(self.norm1(x), rotation, allowed)
            normed = self.norm2(x)
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.rotary = Gqa.Rotary(4, 16)
        self.register_buffer("allowed", torch.ones(16, 16, dtype=torch.bool).tril())
        self.blocks = nn.ModuleList(Gqa.Block() for _ in range(2))
        self.norm = nn.RMSNorm(16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        rotation = self.rotary(ids.shape[1])
        for block in self.blocks:
            x = block(x, rotation, self.allowed)
        return self.head(self.norm(x))


@entry(
    "inplace",
    features(3, 8),
    [
        (["write"], "what crosses the border is written to at once"),
        (["between"], "a view crosses beside its base, both after the write"),
        (["write", "read"], "the base is read in another stage than the one that writes it"),
        (["write", "between", "read"], "four stages"),
        (["paint"], "after all writes but the last"),
    ],
)
class Inplace(nn.Module):
    """Operators in place: on an activation, on a view whose base is read later, on a slice, on a buffer."""

    class Write(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.randn(4))

        def forward(self, x):
            x[:, :4].add_(self.shift)
            part = x[:, 2:6]
            part.mul_(2.0)
            return part

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x):
            self.steps.add_(1)
            self.average.lerp_(x.detach().mean(0), 0.25)
            return x * (1 + self.average)

    class Paint(nn.Module):
        def forward(self, x):
            canvas = torch.zeros(x.shape[0], 6)
            canvas[:, 1:5] = x
            canvas[:, 0] = x.sum(1)
            canvas += 1
            return canvas.clamp_(min=-3)

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.write = Inplace.Write()
        self.between = nn.Linear(4, 4)
        self.read = nn.Linear(8, 4)
        self.count = Inplace.Count()
        self.paint = Inplace.Paint()

    def forward(self, x):
        x = self.count(self.enter(x).relu_()) * 1.5
        part = self.write(x)
        z = self.between(part).sigmoid_()
        y = self.read(x)
        y += z
        return self.paint(y)


@entry("marks", features(3, 8), [], marks=4)
class Marks(nn.Module):
    """Its pipe_split() marks lie between modules and in one; a skip goes over all of them."""

    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(8, 8)
            self.right = nn.Linear(8, 8)

        def forward(self, x):
            x = torch.tanh(self.left(x))
            pipe_split()
            return torch.tanh(self.right(x))

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = Marks.Middle()
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        skip = torch.relu(self.first(x))
        pipe_split()
        x = self.middle(skip)
        pipe_split()
        return self.last(x + skip)


@entry("consecutive_marks", features(3, 8), [], marks=2)
class ConsecutiveMarks(nn.Module):
    """A mark before everything, two at one place, one after everything."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        pipe_split()
        x = torch.tanh(self.first(x))
        pipe_split()
        pipe_split()
        x = torch.tanh(self.last(x))
        pipe_split()
        return x


@entry(
    "peer_example",
    lambda: ((torch.randn(3, 8),), {"y": torch.randn(3, 8)}),
    [
        (["linear0"], "the skip and a parameter with two names cross the border"),
        (["linear0", "linear1"], "one parameter in three stages"),
        (["linear0", "linear1", "linear2"], "the skip goes over three borders"),
        (["linear1:end"], "a product with the shared parameter right behind the cut"),
    ],
)
class PeerExample(nn.Module):
    """What PyTorch's own tests of pipelines try: a skip, a parameter used several times and under two names."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8) / 3)
        self.same_matrix = self.matrix
        self.other_matrix = nn.Parameter(torch.randn(8, 8) / 3)
        self.register_buffer("constant", torch.randn(8))
        self.linear0 = nn.Linear(8, 8)
        self.linear1 = nn.Linear(8, 8)
        self.linear2 = nn.Linear(8, 4)

    def forward(self, x, *, y):
        skip = torch.mm(x, self.matrix)
        x = torch.relu(skip + y)
        raised = self.linear0(x + self.constant)
        x = torch.relu(torch.mm(raised, self.same_matrix)) + skip
        x = self.linear1(x)
        x = torch.tanh(torch.mm(x, self.matrix) + torch.mm(skip, self.other_matrix))
        return self.linear2(x + raised + self.constant)


@entry(
    "late_input",
    lambda: ((torch.randn(3, 8), torch.randn(3, 8)), {}),
    [
        (["layers.1"], "an input for the last stage, an output of the first"),
        (["layers.1", "last"], "three stages; the middle one sees neither"),
        (["layers.0", "layers.1", "last"], "four stages"),
    ],
)
class LateInput(nn.Module):
    """An input that the last module is the first to use, an output that the first module has made."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x, late):
        early = torch.tanh(self.first(x))
        x = early
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x * late), early


@entry(
    "several_users",
    features(3, 8),
    [
        (["b"], "one value, three users behind the border"),
        (["b", "c"], "a value for two later stages"),
        (["b", "c", "d"], "a value for every later stage, and an output"),
        (["a:end", "d"], "cut right behind the module that makes it"),
    ],
)
class SeveralUsers(nn.Module):
    """What an early module gives is used by all later ones."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(16, 8)
        self.d = nn.Linear(8, 4)

    def forward(self, x):
        a = self.a(x)
        b = torch.tanh(self.b(a))
        c = torch.tanh(self.c(torch.cat([a, b], dim=1)))
        return self.d(a * b + c), a


@entry(
    "autocast",
    features(3, 8),
    [
        (["cast"], "before the region"),
        (["cast", "statistics"], "the region alone in a stage"),
        (["cast", "statistics", "head"], "four stages, one a region"),
        (["cast:end"], "bfloat16 crosses the border"),
    ],
    tolerance=2e-2,
)
class Autocast(nn.Module):
    """A region under autocast, one without gradients, and one of these in the other."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.exact = nn.Linear(8, 8)
            self.outer = nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = torch.relu(self.inner(x))
                with torch.autocast("cpu", enabled=False):
                    x = torch.tanh(self.exact(x.float()))
                x = self.outer(x)
            return x * 2

    class Statistics(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                centre = x.mean(0)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    spread = torch.mm(x.t(), x).diagonal()
                spread = spread.float().sqrt() + 1
            return (x - centre / 2) / spread

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.cast = Autocast.Cast()
        self.statistics = Autocast.Statistics()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.enter(x))
        x = self.cast(x)
        x = self.statistics(x.float())
        return torch.sigmoid(self.head(x)) * 256


@entry(
    "called_twice",
    features(3, 8),
    [
        (["middle"], "the calls are in two stages, which share the block's parameters"),
        (["middle", "tail"], "three stages"),
        (["middle", "middle:end", "tail"], "four stages; the second and the last have no part in it"),
        (["tail"], "both calls in one stage"),
    ],
)
class CalledTwice(nn.Module):
    """One block, called twice."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.middle = nn.Linear(8, 8)
        self.tail = nn.Linear(8, 4)

    def forward(self, x):
        x = self.block(self.enter(x))
        x = self.block(self.middle(x))
        return self.tail(x)


@entry(
    "shared_across",
    features(3, 8),
    [
        (["middle"], "first and last stage share a Linear"),
        (["middle", "last"], "they share it over a stage that does not have it"),
        (["first.norm", "middle", "last.norm"], "four stages, of which the first and the third share it"),
    ],
    unused=("unused", "spare.weight", "spare.bias"),
)
class SharedAcross(nn.Module):
    """A Linear in two modules, a parameter and a module without use."""

    class End(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(torch.sin(self.linear(x)))

    def __init__(self):
        super().__init__()
        linear = nn.Linear(8, 8)
        self.first = SharedAcross.End(linear)
        self.middle = nn.Linear(8, 8)
        self.last = SharedAcross.End(linear)
        self.unused = nn.Parameter(torch.randn(3))
        self.spare = nn.Linear(2, 2)

    def forward(self, x):
        x = torch.tanh(self.middle(self.first(x)))
        return torch.sin(self.last(x) + x)


@entry(
    "eval_exported",
    features(3, 8),
    [
        (["layers.4"], "in the middle"),
        (["layers.1", "layers.5"], "each BatchNorm in another stage"),
        (["layers.2", "layers.4", "head"], "four stages"),
    ],
    mode="eval",
    exported_mode="eval",
)
class EvalExported(nn.Module):
    """Exported in eval mode: dropout does nothing, BatchNorm uses the statistics that it has."""

    def __init__(self):
        super().__init__()
        layers = []
        for _ in range(2):
            norm = nn.BatchNorm1d(8)
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            layers += [nn.Linear(8, 8), norm, nn.Tanh(), nn.Dropout(0.5)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x))


@entry(
    "list_outputs",
    features(4, 12),
    [
        (["chunks"], "the parts of a split cross the border one by one"),
        (["chunks", "ordered"], "three stages"),
        (["chunks", "ordered", "head"], "integers from topk and max cross the border"),
    ],
)
class ListOutputs(nn.Module):
    """Operators that give lists and tuples, of which some elements are not used and some cross borders."""

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x):
            return self.linear(x).split([2, 4, 6], dim=1)

    class Chunks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, parts):
            narrow, middle, wide = parts
            first, second = torch.tanh(self.linear(wide)).chunk(2, dim=1)
            pieces = torch.stack([first, second, middle]).unbind(0)
            left, _, right = torch.tensor_split(pieces[0], (1, 3), dim=1)
            return pieces[1] * pieces[2], torch.cat([left, right, narrow], dim=1)

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, y):
            values, places = self.linear(x).topk(3, dim=1)
            largest, at = y.max(dim=1)
            ranked, _ = y.sort(dim=1, descending=True)
            variance, mean = torch.var_mean(y, dim=1)
            return values, places, largest + variance * mean, at, ranked

    def __init__(self):
        super().__init__()
        self.parts = ListOutputs.Parts()
        self.chunks = ListOutputs.Chunks()
        self.ordered = ListOutputs.Ordered()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x, y = self.chunks(self.parts(x))
        values, places, largest, at, ranked = self.ordered(x, y)
        joined = torch.cat([values * places, (largest * at).unsqueeze(1), ranked.square()], dim=1)
        return [self.head(joined), (places, at), values, values]


@entry(
    "scalars",
    lambda: ((torch.randn(3, 2, 8, 8), torch.rand(()) + 0.5, torch.randint(0, 5, (3, 4))), {}),
    [
        (["masks"], "in the middle"),
        (["masks", "sums"], "three stages"),
        (["masks", "sums", "types"], "four stages; a 0-dimensional input for one of them"),
        (["numbers"], "a tensor in channels_last crosses the border"),
        (["rotation.linear"], "a complex tensor crosses the border"),
    ],
)
class Scalars(nn.Module):
    """Arguments of every type that operators take: numbers for tensors, text, dtypes, lists with None, constants."""

    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(2, 4, 3, padding="same")

        def forward(self, images):
            x = images.to(memory_format=torch.channels_last)
            x = F.pad(x, (1, 0, 0, 1), mode="reflect")
            x = self.convolution(F.pad(x, (0, 1), value=0.5))
            x = F.interpolate(x, scale_factor=0.5, mode="bilinear", align_corners=False)
            return F.interpolate(x, size=(3, 3), mode="nearest").contiguous(memory_format=torch.channels_last)

    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x):
            x = (3 - 2 * x + x**2 / 4) * self.scale
            x = torch.add(x, x.sin(), alpha=2) + 2.0 / (1 + x * x) + 2 ** (x / 8)
            x = (x + torch.div(x, 0.3, rounding_mode="floor") + x % 1.5) / 16
            x = F.softplus(x, beta=2, threshold=10.0) + F.gelu(x, approximate="tanh")
            return torch.clamp(x, max=3.5) + x.std(dim=(1, 2, 3), correction=0, keepdim=True)

    class Masks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(9, 4)

        def forward(self, x, temperature):
            x = self.linear(x.flatten(2))
            mask = ((x > 0) & (x <= 1.5)) | torch.logical_not(x == x) | (x.abs() > temperature)
            x = torch.where(mask, x, 0.1) + torch.where(mask, -1.0, x * temperature)
            causal = torch.ones(4, 4, dtype=torch.bool).triu(diagonal=1)
            weights = x.masked_fill(causal, float("-inf")).softmax(-1, dtype=torch.float32)
            return torch.einsum("bij,bjk->bik", weights, x) + mask.any(dim=-1, keepdim=True)

    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            turns = torch.polar(torch.ones(4, 2), torch.linspace(0.0, 1.0, 8).view(4, 2))
            turned = turned * turns * (1 + 0.5j)
            return torch.tanh(self.linear(x)) + torch.view_as_real(turned).flatten(-2) + turned.abs().sum(-1, True)

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(5, 4))

        def forward(self, x, ids):
            order = torch.tensor([3, 1, 0, 2])
            x = x[:, order] + x[..., None, :, torch.tensor([0, -1])].sum(-1, keepdim=True).squeeze(1)
            x = x.cumsum(1) + torch.zeros(4, 5).scatter(1, order.unsqueeze(1), 2.5)[:, :4]
            x = x + torch.zeros_like(x).scatter_reduce(2, ids[:, :, None], x, reduce="amax", include_self=False) / 2
            bins = torch.bucketize(x.detach(), torch.tensor([-0.5, 0.0, 1.25]), right=True)
            return x.roll(1, dims=2) + self.table[bins, torch.tensor(2)] + F.embedding(ids, self.table)

    class Types(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            x = x / 16
            exact = x.to(torch.float64).cumprod(-1)
            whole = x.long() % 3
            half = x.to(torch.bfloat16).to(x)
            return self.linear(exact.float() + whole + half + (x > 0.25).int() * True), exact.sum(-1), whole

    def __init__(self):
        super().__init__()
        self.images = Scalars.Images()
        self.numbers = Scalars.Numbers()
        self.masks = Scalars.Masks()
        self.rotation = Scalars.Rotation()
        self.sums = Scalars.Sums()
        self.types = Scalars.Types()

    def forward(self, images, temperature, ids):
        x = self.numbers(self.images(images))
        x = self.rotation(self.masks(x, temperature))
        return self.types(self.sums(x, ids % 4))


def joined(values):
    """The microbatches' values of one input or output, as one tensor."""
    if not isinstance(values[0], torch.Tensor):
        return torch.tensor(values, dtype=torch.int64)
    return (torch.cat if values[0].dim() else torch.stack)([value.detach() for value in values]).contiguous()


def named_inputs(microbatches):
    leaves, _ = pytree.tree_flatten_with_path(microbatches[0])
    names = []
    for (side, *path), _ in leaves:
        steps = [key.idx if isinstance(key, pytree.SequenceKey) else key.key for key in path]
        names.append(".".join(map(str, [("args", "kwargs")[side.idx], *steps])))
    columns = zip(*map(pytree.tree_leaves, microbatches))
    return {name: joined(column) for name, column in zip(names, columns) if isinstance(column[0], torch.Tensor)}


def save_tensors(tensors, path):
    """As safetensors.torch.save_file, which needs NumPy."""
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    safetensors.serialize_file(specs, path)


def computed(model, microbatches):
    """What NAME.expected.safetensors has, and the number of outputs."""
    outputs = []
    for args, kwargs in copy.deepcopy(microbatches):
        outputs.append(pytree.tree_leaves(model(*args, **kwargs)))
        floats = [x for x in outputs[-1] if isinstance(x, torch.Tensor) and x.is_floating_point()]
        loss = sum(x.mean().float() for x in floats)
        (loss / len(microbatches)).backward()
    values = {f"output.{i}": joined(column) for i, column in enumerate(zip(*outputs)) if column[0] is not None}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.grad is not None:
            values[f"grad.{name}"] = parameter.grad.clone().contiguous()
    for name, buffer in model.named_buffers():
        values[f"buffer.{name}"] = buffer.detach().clone().contiguous()
    return values, len(outputs[0])


def shared_names(model):
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def exported(model, zoo_entry, microbatch):
    args, kwargs = zoo_entry.inputs(**zoo_entry.example) if zoo_entry.dynamic else copy.deepcopy(microbatch)
    model.train(zoo_entry.exported_mode == "train")
    program = torch.export.export(model, args, kwargs, dynamic_shapes=zoo_entry.dynamic)
    return program.run_decompositions({}) if zoo_entry.functionalized else program


def check_gradients(model, zoo_entry, expected):
    for name, _ in model.named_parameters():
        gradient = expected.get(f"grad.{name}")
        assert (gradient is None) == (name in zoo_entry.unused), f"{name} is not as `unused` says"
        if gradient is not None:
            largest = gradient.abs().max().item()
            assert largest > 10 * zoo_entry.tolerance, f"the gradient of {name} is no more than {largest:.2g}"


def check_cuts(program, zoo_entry):
    """Every cut must be at modules that the program has, in their order, with something to compute in each stage."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    spans = {}
    for i, node in enumerate(calls):
        for path, _ in node.meta.get("nn_module_stack", {}).values():
            spans.setdefault(path, [i, i])[1] = i
    for at, _ in zoo_entry.cuts:
        places = [spans[name.removesuffix(":end")] for name in at]
        starts = [span[1] + 1 if name.endswith(":end") else span[0] for name, span in zip(at, places)]
        bounds = [0, *starts, len(calls)]
        assert all(map(operator.lt, bounds, bounds[1:])), f"the cut at {at} has an empty stage: {bounds}"
    marks = [i for i, node in enumerate(calls) if node.target == torch.ops.pippy._pipe_split.default]
    bounds = [-1, *marks, len(calls)]
    found = sum(upper - lower > 1 for lower, upper in zip(bounds, bounds[1:])) if marks else 0
    assert found == zoo_entry.marks, f"the marks make {found} stages, not {zoo_entry.marks}"


def check_program(program, zoo_entry, microbatches, expected, shared):
    """The program that was read back must compute what the module does."""
    if zoo_entry.mode == "eval" and zoo_entry.exported_mode == "train":
        for node in program.graph.nodes:
            if node.target == torch.ops.aten.dropout.default:
                node.args = (*node.args[:2], False)
    # A functionalized BatchNorm saves its statistics for the backward, and then they are overwritten.
    with contextlib.ExitStack() as stack:
        if zoo_entry.functionalized:
            stack.enter_context(torch.autograd.graph.allow_mutation_on_saved_tensors())
        found, _ = computed(program.module(), microbatches)
    for group in shared:
        for name in group:
            present = [f"grad.{other}" for other in group if f"grad.{other}" in found]
            found.setdefault(f"grad.{name}", found[present[0]])
    assert found.keys() == expected.keys(), f"the program's values differ: {found.keys() ^ expected.keys()}"
    for name, right in expected.items():
        ours = found[name]
        assert (ours.dtype, ours.shape) == (right.dtype, right.shape), f"{name} is {ours.dtype} {list(ours.shape)}"
        difference = (ours.double() - right.double()).abs().max().item()
        allowed = zoo_entry.tolerance * max(1, right.double().abs().max().item())
        assert difference <= allowed, f"{name} of the program differs by {difference:.2g}"


def write_model(folder, name, zoo_entry):
    """Writes the model's files; gives the number of nodes, those of regions included."""
    torch.manual_seed(zlib.crc32(name.encode()))
    model = zoo_entry.model()
    microbatches = [zoo_entry.inputs() for _ in range(MICROBATCHES)]

    eager = copy.deepcopy(model).train(zoo_entry.mode == "train")
    expected, outputs = computed(eager, microbatches)
    shared = shared_names(model)
    check_gradients(model, zoo_entry, expected)

    torch.export.save(exported(model, zoo_entry, microbatches[0]), folder / f"{name}.pt2")
    program = torch.export.load(folder / f"{name}.pt2")
    check_cuts(program, zoo_entry)
    check_program(program, zoo_entry, microbatches, expected, shared)

    save_tensors(named_inputs(microbatches), folder / f"{name}.inputs.safetensors")
    save_tensors(expected, folder / f"{name}.expected.safetensors")
    cuts = [{"at": at, "stages": len(at) + 1, "why": why} for at, why in zoo_entry.cuts]
    if zoo_entry.marks:
        cuts.append({"at": [], "marks": True, "stages": zoo_entry.marks, "why": "at its pipe_split() marks"})
    description = {
        "name": name,
        "microbatches": MICROBATCHES,
        "mode": zoo_entry.mode,
        "tolerance": zoo_entry.tolerance,
        "outputs": outputs,
        "shared": shared,
        "cuts": cuts,
        "dynamic": zoo_entry.dynamic is not None,
    }
    (folder / f"{name}.json").write_text(json.dumps(description, indent=2) + "\n")
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return sum(len(graph.nodes) for graph in graphs)


def write(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    for name in names:
        started = time.perf_counter()
        try:
            nodes = write_model(folder, name, ZOO[name])
        except Exception as error:
            error.add_note(f"while writing the model {name}")
            raise
        print(f"{name:18} {nodes:5} nodes {time.perf_counter() - started:6.2f} s")
    (folder / "zoo.json").write_text(json.dumps(names, indent=2) + "\n")
    print(f"{len(names)} models in {folder}, {time.perf_counter() - start:.1f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write"])
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=list(ZOO), metavar="NAME", help="one of " + ", ".join(ZOO))
    arguments = parser.parse_args()
    write(arguments.folder, arguments.only or list(ZOO))
    return 0


if __name__ == "__main__":
    sys.exit(main())
