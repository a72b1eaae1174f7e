"""A small GPT on bytes, exported for Penstock: the last that Python has to do with it.

    python examples/export_gpt.py gpt.pt2
    penstock check gpt.pt2 --stages 4 --schedule ZBVZeroBubble
"""

import sys

import torch
import torch.nn.functional as F

BYTES, HEADS = 256, 4


class Block(torch.nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.dropout = dropout
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
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=dropout)
        y = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return y + self.down(F.gelu(self.up(self.before_perceptron(y))))


class GPT(torch.nn.Module):
    def __init__(self, layers, width, length, dropout=0.0):
        super().__init__()
        self.bytes = torch.nn.Embedding(BYTES, width)
        self.places = torch.nn.Parameter(torch.randn(length, width))
        self.blocks = torch.nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, BYTES)

    def forward(self, ids):
        x = self.bytes(ids) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: export_gpt.py FILE.pt2")
    torch.manual_seed(0)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    exported = torch.export.export(GPT(layers=4, width=64, length=32, dropout=0.1).train(), (ids,))
    torch.export.save(exported, sys.argv[1])
