"""The GPT of examples/ as bench/program.py exports it for us and gives it to PyTorch; its blocks are those of
bench/transformer.h."""

import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
from export_gpt import BYTES, GPT, Block  # noqa: E402, F401

LAYERS = 4
# A case's width, and the rows and tokens of a microbatch: one that computes, and one that is all overhead.
CASES = {"wide": (256, 2, 128), "tiny": (64, 1, 1)}


def make(case):
    """The model, and the ids of a microbatch."""
    width, rows, length = CASES[case]
    torch.manual_seed(0)
    return GPT(LAYERS, width, length), torch.zeros(rows, length, dtype=torch.int64)


def text_for(case, microbatches):
    """The ids of a batch, and those that come next."""
    _, rows, length = CASES[case]
    text = torch.randint(BYTES, (rows * microbatches, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
