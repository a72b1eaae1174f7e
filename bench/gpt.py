"""The GPT of examples/, which bench/program.py exports for Penstock and passes to PyTorch. Its blocks equal those of
bench/transformer.h."""

import pathlib
import sys

import torch
import torch.nn.functional as F

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
from export_gpt import BYTES, GPT, Block  # noqa: E402, F401

LAYERS = 4
# Width, rows and tokens of a microbatch for each case: one bound by computation, and one by overhead.
CASES = {"wide": (256, 2, 128), "tiny": (64, 1, 1)}


def make(case):
    """Returns the model, and the token ids of a microbatch."""
    width, rows, length = CASES[case]
    torch.manual_seed(0)
    return GPT(LAYERS, width, length), torch.zeros(rows, length, dtype=torch.int64)


def text_for(case, microbatches):
    """Returns the token ids of a batch, and the next tokens as targets."""
    _, rows, length = CASES[case]
    text = torch.randint(BYTES, (rows * microbatches, length + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
