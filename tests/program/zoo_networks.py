"""Common network architectures of the zoo."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from zoo_entries import BATCH, entry, features, tokens


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
    """Has skip connections from the encoder to the decoder."""

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
    """Self-attention, or cross-attention to a memory."""

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
    """Causal attention without an explicit mask."""

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
    """Has dropout, and a head that is tied to the embedding."""

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
    """Returns a source, a target, and a mask of the source tokens that are not padding."""
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
    """Exports to one node that takes lists of tensors and has three results."""

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
    """Every expert computes every token; the two best are used."""
    weights, chosen = probabilities.topk(2, dim=-1)
    gates = (F.one_hot(chosen, len(experts)).to(x.dtype) * weights.unsqueeze(-1)).sum(1)
    answers = torch.stack([expert(x) for expert in experts], dim=1)
    return (answers * gates.unsqueeze(-1)).sum(1)


def capacity_mixture(experts, x, probabilities):
    """Every expert computes the four tokens with the highest score for it."""
    weights, chosen = probabilities.t().topk(4, dim=1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = x.gather(0, chosen[number].unsqueeze(1).expand(-1, x.shape[1]))
        out = out.index_add(0, chosen[number], expert(rows) * weights[number].unsqueeze(1))
    return out


def dropless_mixture(experts, x, probabilities):
    """Every expert computes the tokens that are routed to it, whose number depends on the data."""
    weights, chosen = probabilities.topk(2, dim=-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, place = torch.where(chosen == number)
        out = out.index_add(0, token, expert(x[token]) * weights[token, place].unsqueeze(1))
    return out


class Moe(nn.Module):
    """A mixture of experts. The second output, without dimensions, is the sum of the balance losses of its layers."""

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
    """Has grouped queries, rotary embeddings from non-persistent buffers, and a persistent causal mask."""

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
