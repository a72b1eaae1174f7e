"""Models of the zoo with various boundary values and pipe_split() calls."""

import torch
from torch import nn
from torch.distributed.pipelining import pipe_split
from zoo_entries import entry, features


@entry("marks", features(3, 8), [], marks=4)
class Marks(nn.Module):
    """Has pipe_split() calls between modules and in one, and a skip connection over all of them."""

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
    """Has a pipe_split() call before everything, two in a row, and one after everything."""

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
    "reference_example",
    lambda: ((torch.randn(3, 8),), {"y": torch.randn(3, 8)}),
    [
        (["linear0"], "the skip and a parameter with two names cross the border"),
        (["linear0", "linear1"], "one parameter in three stages"),
        (["linear0", "linear1", "linear2"], "the skip goes over three borders"),
        (["linear1:end"], "a product with the shared parameter right behind the cut"),
    ],
)
class ReferenceExample(nn.Module):
    """Has what PyTorch's tests of pipelining have: a skip, and a parameter that is used several times and under two names."""

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
    """Has an input that only the last module uses, and an output of the first module."""

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
    """Uses the output of an early module in all later ones."""

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
    """Calls one block twice."""

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
    """Has a Linear in two modules, an unused parameter and an unused module."""

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
    "detached",
    features(3, 8),
    [
        (["middle", "middle:end", "last"], "what was written through a detached view has a gradient in another stage"),
        (["middle:end", "last"], "detached in one stage, written in the next, used in the last"),
        (["last"], "detached and written in one stage"),
        (["middle", "last", "last:end"], "the tensor behind the view is used last"),
    ],
)
class Detached(nn.Module):
    """Writes to a tensor through its detached view: one memory, two gradients."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        base = torch.tanh(self.first(x)) * 2
        view = base.detach()
        hidden = self.middle(x)
        view[1].copy_(hidden[0])
        return self.last(view[:, :8]) + base


@entry(
    "sparse_gradients",
    lambda: ((torch.randint(0, 10, (3, 5)),), {}),
    [
        (["middle"], "the two stages share a table with sparse gradients"),
        (["middle", "head"], "a third takes it as a dense matrix"),
    ],
)
class SparseGradients(nn.Module):
    """Has a table whose gradients are sparse in one use and dense in another, and a sparse constant matrix."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.head.weight = self.table.weight

    def forward(self, ids):
        places = torch.tensor([[0, 1, 2], [2, 0, 1]])
        mixing = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0, 3.0]), (3, 3))
        hidden = torch.tanh(self.middle(self.table(ids))) + self.table(ids)
        mixed = (mixing @ hidden.flatten(1)).view_as(hidden)
        return self.head(mixed)


@entry(
    "assigned_buffer",
    features(3, 8),
    [
        (["middle"], "what is assigned is made before the cut, and the export writes it behind all others"),
        (["middle", "last"], "the same with a stage between"),
    ],
)
class AssignedBuffer(nn.Module):
    """Assigns two buffers, of which the next microbatch reads one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.register_buffer("memory", torch.zeros(3, 8))
        self.register_buffer("seen", torch.zeros(3, 8))

    def forward(self, x):
        hidden = torch.tanh(self.first(x) + self.memory)
        self.memory = hidden.detach()
        hidden = self.middle(hidden)
        self.seen = hidden.detach() * 2
        return self.last(torch.relu(hidden))
