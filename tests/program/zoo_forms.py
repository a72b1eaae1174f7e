"""Models of the zoo with various arguments, outputs, operators and modes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim
from zoo_entries import BATCH, entry, features
from zoo_networks import TransformerBlock


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
    """A transformer in bfloat16. Its output is scaled up, so that the gradients are larger than the rounding errors.

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
    "inplace",
    features(3, 8),
    [
        (["write"], "the boundary value is mutated at once"),
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
    """Has a region under autocast, one without gradients, and one nested in the other."""

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
    """Exported in evaluation mode: dropout does nothing, and BatchNorm uses its running statistics."""

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
    """Operators that return lists and tuples, of which some elements are unused and some are boundary values."""

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
    """Passes arguments of every type to operators: numbers for tensors, strings, dtypes, lists with None, constants."""

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
