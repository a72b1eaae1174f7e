"""Exports small programs, each for a few tests of penstock/program. See zoo.py for larger ones.

    models.py DIR [--only NAME …]

Writes for each model NAME.pt2, and NAME.expected.safetensors for those whose numbers eager PyTorch is asked for:

    input.I, output.I    of a run in which the module is as it was exported, or as its class says
    state.NAME           of its state_dict before that
    grad.NAME            of the sum of its outputs
"""

import argparse
import pathlib
import sys
import time
import typing
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
warnings.filterwarnings("ignore", message="The tensor attributes self.lstm._flat_weights")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from exporting import save_tensors  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import pipe_split  # noqa: E402
from torch.export import Dim  # noqa: E402

MODELS: dict[str, typing.Callable[[pathlib.Path, str], None]] = {}


def write(name, *args, kwargs=None, dynamic=None, train=True, functional=False, expected=None, device="cpu"):
    """Puts a class of models among those that are exported, with an example of its arguments. `expected` computes what
    its expected values are from the module and the arguments. What is functional has nothing in place, and operators
    taken apart."""

    def put(model_class):
        assert name not in MODELS

        def export(folder, seed):
            torch.manual_seed(seed)
            with torch.device(device):
                model = model_class().train(train)
                example = args if args and not callable(args[0]) else args[0]()
            if expected:
                save_tensors(expected(model, *example), folder / f"{name}.expected.safetensors")
            program = torch.export.export(model, example, kwargs, dynamic_shapes=dynamic)
            if functional:
                program = program.run_decompositions({})
            torch.export.save(program, folder / f"{name}.pt2")

        MODELS[name] = export
        return model_class

    return put


def computed(model, *args):
    """Returns the outputs and gradients of the module, in its current mode."""
    values = {f"state.{name}": tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    values |= {f"input.{i}": arg for i, arg in enumerate(args)}
    outputs = model(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(output.float().sum() for output in outputs).backward()
    values |= {f"output.{i}": output.detach().contiguous() for i, output in enumerate(outputs)}
    grads = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    values |= {f"grad.{name}": grad.contiguous() for name, grad in grads.items() if grad is not None}
    model.zero_grad()
    return values


def in_evaluation(model, *args):
    values = computed(model.eval(), *args)
    model.train()
    return values


def under_autocast(model, *args):
    with torch.autocast("cpu", torch.bfloat16):
        return computed(model, *args)


def of_sizes(model, x):
    """Returns the numbers that the model computes for some sizes, a column each."""
    sizes = [2, 5, 699, 700, 701, 706, 707, 1000]
    columns = zip(*(model(x[:1].expand(size, -1))[1:] for size in sizes))
    values = {f"output.{i}": torch.tensor(column, dtype=torch.float64) for i, column in enumerate(columns, 1)}
    return values | {"sizes": torch.tensor(sizes)}


@write("pair", torch.ones(3, 4))
class Pair(nn.Module):
    """Has two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@write("number", torch.ones(3, 4), 5, dynamic={"x": None, "times": Dim.DYNAMIC})
class Number(nn.Module):
    """Takes a number, which the last stage uses."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x, times):
        return self.second(torch.relu(self.first(x))) * times


@write("counted_at_the_end", torch.ones(2, 4), functional=True)
class CountedAtTheEnd(nn.Module):
    """Counts in a buffer, which is written at the end and used by both halves."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        x = self.first(x)
        self.count.add_(1)
        pipe_split()
        return self.second(x * self.count)


@write("plus_equals", torch.ones(2, 4))
class PlusEquals(nn.Module):
    """The export ends with a copy of the buffer to itself, and the backward needs the buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("total", torch.ones(4))

    def forward(self, x):
        x = self.first(x)
        self.total += 1
        return x * self.total


@write("shared_without_grad", torch.ones(2, 4))
class SharedWithoutGrad(nn.Module):
    """Has a layer without gradients that both halves use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.both = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            u = self.both(x)
        y = self.first(x) + u
        pipe_split()
        with torch.no_grad():
            v = self.both(u)
        return y + v


@write("written_parameter", torch.ones(2, 4))
class WrittenParameter(nn.Module):
    """Writes to a parameter in each forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.fading = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.fading.mul_(0.9)
        return self.first(x) + self.fading


@write("written_factor", torch.ones(2, 4))
class WrittenFactor(nn.Module):
    """Writes to a parameter in each forward, and its backward needs it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.fading = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.fading.mul_(0.9)
        return self.first(x) * self.fading


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 256)
        self.down = nn.Linear(256, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@write("blocks", torch.ones(512, 16))
class Blocks(nn.Module):
    """Has four blocks in a list, beside lists whose elements are single operators."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class AddsToAView(nn.Module):
    def forward(self, x, view):
        view.add_(1)
        return x.exp() * view.sum()


@write("written_view", torch.ones(2, 4))
class WrittenView(nn.Module):
    """Calls a module with a tensor and a view of it, into which the module writes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = AddsToAView()

    def forward(self, x):
        y = self.first(x)
        return self.inner(y, y[:, :2])


@write("expanded_buffer", torch.ones(2, 4))
class ExpandedBuffer(nn.Module):
    """Has an expanded buffer, whose elements share memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("same", torch.ones(1).expand(4))

    def forward(self, x):
        return self.first(x) + self.same


@write("view_of_written", torch.ones(2, 4))
class ViewOfWritten(nn.Module):
    """Has two buffers that share storage, of which one is mutated."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("whole", torch.ones(8))
        self.register_buffer("part", self.whole[:4])

    def forward(self, x):
        self.whole.add_(1)
        return self.first(x) + self.part


@write("detached_twice", torch.ones(2, 4))
class DetachedTwice(nn.Module):
    """Writes to a tensor and to its detached view."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x):
        base = self.first(x)
        view = base.detach()
        view.copy_(self.second(x))
        out = self.third(x)
        base.mul_(2)
        return out + view


@write("sparse_crosses", torch.ones(4, 4))
class SparseCrosses(nn.Module):
    """Has a sparse tensor that depends on the input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        matrix = x.to_sparse()
        return torch.sparse.mm(matrix, self.first(x))


@write("sparse", torch.tensor([1, 2, 1]))
class Sparse(nn.Module):
    """Has sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.last = nn.Linear(4, 4)

    def forward(self, ids):
        return self.last(self.table(ids))


@write("cond", torch.ones(3, 4))
class Cond(nn.Module):
    """Has a branch, which is a higher-order operator."""

    class Choice(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    def __init__(self):
        super().__init__()
        self.choice = Cond.Choice()

    def forward(self, x):
        return self.choice(x) * 2


torch.library.define("strange::twice", "(Tensor x) -> Tensor")
torch.library.impl("strange::twice", "CompositeExplicitAutograd", lambda x: x * 2)
torch.library.register_fake("strange::twice", torch.empty_like)


@write("strange", torch.ones(3, 4))
class Strange(nn.Module):
    """Calls an operator that no C++ library has."""

    class Odd(nn.Module):
        def forward(self, x):
            return torch.ops.strange.twice(x)

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"odd": Strange.Odd()})

    def forward(self, x):
        return self.inner["odd"](x + 1)


@write(
    "inputs",
    lambda: (torch.ones(4, 5, 6), [torch.ones(4, 6)], 3),
    kwargs={"mask": torch.ones(5, 5, dtype=torch.bool), "scale": 2, "how": "sum", "more": None},
    dynamic={
        "x": {0: Dim("batch", min=2, max=8), 1: Dim("time", min=3, max=9)},
        "y": [{0: Dim("batch", min=2, max=8)}],
        "times": None,
        "mask": {0: Dim("time", min=3, max=9), 1: Dim("time", min=3, max=9)},
        "scale": None,
        "how": None,
        "more": None,
    },
)
class Inputs(nn.Module):
    """Takes arguments of all kinds: dynamic sizes, some of them equal, and fixed values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, y, times, *, mask, scale, how, more=None):
        x = self.linear(x) * times + y[0].unsqueeze(1) * scale
        weights = mask.to(x.dtype) @ x
        return {"out": weights.sum(1) if how == "sum" else weights, "rows": x.shape[0]}


@write(
    "derived",
    torch.ones(4, 3),
    torch.ones(8, 3),
    dynamic={"x": {0: Dim("half")}, "y": {0: 2 * Dim("half")}},
)
class Derived(nn.Module):
    """Has a size that is twice another one."""

    def forward(self, x, y):
        return y[::2] + x


@write("arithmetic", torch.ones(5, 2), dynamic={"x": {0: Dim("n", min=2, max=1000)}}, expected=of_sizes)
class Arithmetic(nn.Module):
    """Python's arithmetic on numbers that are negative for most sizes; expected for several of those."""

    def forward(self, x):
        n = x.shape[0] - 700
        seventh = n / 7
        whole = n // 7, n % 7, n // -7, n % -7, n**3, -n, torch.sym_max(n, -5), torch.sym_int(seventh)
        return x.sum(), *whole, seventh, seventh % 2.0


@write("tied", torch.zeros(2, 3, dtype=torch.int64), expected=computed)
class Tied(nn.Module):
    """Has a weight under two names, and persistent and non-persistent buffers."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("factor", torch.tensor([2.0]))
            self.register_buffer("shift", torch.tensor([0.5]), persistent=False)

        def forward(self, x):
            return x * self.factor + self.shift

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.scale = Tied.Scale()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.frozen(self.scale(self.embedding(ids))))


@write("dropouts", torch.randn(3, 4, 8), expected=in_evaluation)
class Dropouts(nn.Module):
    """Has transformer blocks with dropout at all usual places. The expected values are of evaluation mode."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(8, 24)
            self.out = nn.Linear(8, 8)
            self.dropout = nn.Dropout(0.3)
            self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

        def forward(self, x):
            q, k, v = self.mix(x).chunk(3, -1)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25 if self.training else 0.0)
            x = x + self.dropout(self.out(mixed))
            return x + F.alpha_dropout(self.mlp(x), 0.1, self.training)

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Dropouts.Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@write("attention", torch.randn(2, 6, 8), expected=in_evaluation)
class Attention(nn.Module):
    """Has dropout in attention only. The expected values are of evaluation mode."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.mix(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)


@write("recurrent", torch.randn(2, 6, 8), expected=in_evaluation)
class Recurrent(nn.Module):
    """Has dropout between the layers of an LSTM only. The expected values are of evaluation mode."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


for model, example in [(Dropouts, (3, 4, 8)), (Attention, (2, 6, 8)), (Recurrent, (2, 6, 8))]:
    name = f"{model.__name__.lower()}_functional"
    write(name, torch.randn(example), functional=True, expected=in_evaluation)(model)


class Norms(nn.Module):
    """Has batch normalisations and dropouts. The expected values are of evaluation mode."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        )
        self.plain = nn.BatchNorm1d(8, track_running_stats=False)
        with torch.no_grad():
            self.layers[1].running_mean += torch.randn(8)

    def forward(self, x):
        return self.plain(self.layers(x))


write("norms", torch.randn(6, 8), expected=in_evaluation)(Norms)
write("norms_functional", torch.randn(6, 8), functional=True, expected=in_evaluation)(Norms)
write("norms_in_evaluation", torch.randn(6, 8), train=False)(Norms)


@write("mixed", torch.randn(6, 16), expected=under_autocast)
class Mixed(nn.Module):
    """Has a softmax and a norm, which autocast leaves in float32. The expected values are under autocast."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return torch.softmax(self.layers(x), -1), self.layers(x)


@write("chain", torch.zeros(512, 512))
class Chain(nn.Module):
    """Computes values of a megabyte one after the other, each used once at most."""

    def forward(self, x):
        for _ in range(8):
            x = torch.sin(x * 2)
            x.chunk(2)[0].cos()
            x = torch.add(x, x)
        return x


@write("leading_marks", torch.ones(3, 4))
class LeadingMarks(nn.Module):
    """Has consecutive pipe_split() calls before everything, in the middle, and after everything."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 4)

    def forward(self, x):
        pipe_split()
        pipe_split()
        x = self.first(x)
        pipe_split()
        pipe_split()
        pipe_split()
        x = self.third(self.second(x))
        pipe_split()
        pipe_split()
        return x


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, factor):
        return self.linear(x) * factor


@write("counted", torch.ones(2, 4))
class Counted(nn.Module):
    """The first module writes to a buffer that the second one reads."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1)
            return self.linear(x) * 2

    def __init__(self):
        super().__init__()
        self.first = Counted.Counts()
        self.second = Reads()

    def forward(self, x):
        return self.second(self.first(x), self.first.count)


@write("written_later", torch.ones(2, 4))
class WrittenLater(nn.Module):
    """The second module writes to a buffer that the first one reads."""

    def __init__(self):
        super().__init__()
        self.first = Reads()
        self.second = Counted.Counts()

    def forward(self, x):
        return self.second(self.first(x, self.second.count))


@write("averaged", torch.ones(2, 4))
class Averaged(nn.Module):
    """Writes to a buffer in place in each module, and needs its old content for the backward."""

    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("average", torch.ones(4))

        def forward(self, x):
            x = self.linear(x)
            self.average.lerp_(x.detach().mean(0), 0.25)
            return x * self.average

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Averaged.Average() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@write("updated", torch.ones(2, 4))
class Updated(nn.Module):
    """Assigns a buffer, which is written at the very end; only the nodes before can be in another stage."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        x = self.first(x)
        self.average = self.average * 0.75 + x.detach().mean(0) * 0.25
        return self.second(x - self.average)


@write("writes_input", torch.ones(2, 4))
class WritesInput(nn.Module):
    """Writes in place to its input, and needs it for the backward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        x.mul_(2)
        return self.second(self.first(x))


@write("ambiguous_alias", torch.ones(2, 4))
class AmbiguousAlias(nn.Module):
    """Writes in place to the output of dropout, and then uses its input: one tensor in evaluation mode only."""

    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.doubles = AmbiguousAlias.Doubles()
        self.last = Reads()

    def forward(self, x):
        x = self.first(x)
        return self.last(x, self.doubles(self.dropout(x)))


@write("length", torch.ones(2, 5, 4), dynamic={"x": {1: Dim("time", min=2, max=64)}})
class Length(nn.Module):
    """Uses a size after the last use of its tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        time = x.shape[1]
        x = self.first(x).sum(1)
        return self.second(x) / time, time * 2 - 1


@write("masked", torch.ones(2, 5, 4))
class Masked(nn.Module):
    """Has a mask that depends on numbers and a constant only, and is used by all layers."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask):
            x = self.linear(x)
            return (x @ x.mT).masked_fill(mask, float("-inf")).softmax(-1) @ x

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Masked.Layer() for _ in range(3))
        self.register_buffer("rows", torch.arange(5))

    def forward(self, x):
        mask = self.rows.unsqueeze(1) < torch.arange(5)
        for layer in self.layers:
            x = layer(x, mask)
        return x


@write("indices", torch.randn(3, 6))
class Indices(nn.Module):
    """Passes indices, booleans and non-contiguous tensors between its modules."""

    class Choose(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x):
            x = self.linear(x)
            left, right = x.chunk(2, 1)
            return left.t(), right > 0, x.argmax(1)

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 4)

        def forward(self, left, flags, chosen):
            return self.embedding(chosen) * flags + left.t()

    def __init__(self):
        super().__init__()
        self.choose = Indices.Choose()
        self.look = Indices.Look()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.head(self.look(*self.choose(x)))}


@write("identity", torch.ones(3, 4))
class Identity(nn.Module):
    """Computes nothing."""

    def forward(self, x):
        return x


def meta_tokens():
    return (torch.zeros(2, 5, dtype=torch.int64),)


@write("uninitialised", meta_tokens, device="meta")
class Uninitialised(nn.Module):
    """Has shapes and no values: embedding, attention, normalisations, a recurrent layer, a convolution; and a tied weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) * torch.arange(8, device=tokens.device)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.recurrent(x)[0]
        x = x + self.norm(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.last(self.drop(x)))


@write("uninitialised_places", meta_tokens, device="meta")
class UninitialisedPlaces(nn.Module):
    """The same with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.places = nn.Parameter(torch.empty(5, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head(self.embedding(tokens) + self.places)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=list(MODELS), metavar="NAME", help="one of " + ", ".join(MODELS))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    start = time.perf_counter()
    for seed, (name, export) in enumerate(MODELS.items()):
        if arguments.only and name not in arguments.only:
            continue
        try:
            export(arguments.folder, seed)
        except Exception as error:
            error.add_note(f"while writing the model {name}")
            raise
    print(f"{len(arguments.only or MODELS)} programs in {arguments.folder}, {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
