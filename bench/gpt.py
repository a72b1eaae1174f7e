"""The GPT that bench/program.py exports for us and gives to the peer as it is; its blocks are those of
bench/transformer.h."""

import torch
import torch.nn.functional as F

LAYERS, BYTES = 4, 256
# A case's width, and the rows and tokens of a microbatch: one that computes, and one that is all overhead.
CASES = {"wide": (256, 2, 128), "tiny": (64, 1, 1)}
HEADS = 4


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.before_attention = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.before_perceptron = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        heads = [part.view(rows, length, HEADS, width // HEADS).transpose(1, 2) for part in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        y = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return y + self.down(F.gelu(self.up(self.before_perceptron(y))))


class GPT(torch.nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.bytes = torch.nn.Embedding(BYTES, width)
        self.places = torch.nn.Parameter(torch.randn(length, width))
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, BYTES)

    def forward(self, ids):
        x = self.bytes(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(case):
    """The model, and the ids of a microbatch."""
    width, rows, length = CASES[case]
    torch.manual_seed(0)
    return GPT(width, length), torch.zeros(rows, length, dtype=torch.int64)


def text_for(case, microbatches):
    """The ids of a batch, and those that come next."""
    _, rows, length = CASES[case]
    text = torch.randint(BYTES, (rows * microbatches, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
