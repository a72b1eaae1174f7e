"""Exports the models of bench/memory.py, which starts it. So memory.py itself stays small: a process that is started by a
large one counts its memory in its own peak.

    memory_models.py layers FOLDER          large.pt2 with 1 GiB of weights, tiny.pt2, and NAME.safetensors with inputs
    memory_models.py training FOLDER MICROBATCHES   models whose memory is predicted; prints the words that train each, as JSON
"""

import json
import pathlib
import random
import sys

import gpt
import torch

sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests/program"))
from exporting import save_tensors  # noqa: E402

# Square layers of this width have 1 GiB of weights in float32.
LAYERS, WIDTH = 16, 4096
ROWS = 32


def export_layers(folder, name, width):
    layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    torch.export.save(torch.export.export(layers, (torch.zeros(1, width),)), folder / f"{name}.pt2")
    save_tensors({"args.0": torch.zeros(LAYERS, width)}, folder / f"{name}.safetensors")


class Convolutions(torch.nn.Module):
    """A convolutional net with BatchNorm, whose activations shrink and whose weights grow from layer to layer."""

    def __init__(self, channels=16, blocks=8, classes=10):
        super().__init__()
        layers, size = [], 3
        for block in range(blocks):
            wide = channels * 2 ** (block // 3)
            stride = 2 if block % 3 == 2 else 1
            layers.append(torch.nn.Sequential(torch.nn.Conv2d(size, wide, 3, stride, 1), torch.nn.BatchNorm2d(wide), torch.nn.ReLU()))
            size = wide
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(size, classes)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


def export(folder, name, model, microbatch, batch, target):
    torch.export.save(torch.export.export(model.train(), (microbatch,)), folder / f"{name}.pt2")
    (folder / name).mkdir()
    save_tensors({"args.0": batch, "target": target}, folder / name / "0.safetensors")
    return [str(folder / f"{name}.pt2"), "--data", str(folder / name), "--loss", "cross_entropy"]


def training_words(folder, microbatches):
    """Writes the files of the models, and returns the words that train each by its name."""
    torch.manual_seed(0)
    rows = ROWS // microbatches
    text = torch.randint(gpt.BYTES, (ROWS, 65))
    (folder / "bytes").write_bytes(random.Random(0).randbytes(100_000))
    transformer = gpt.GPT(layers=8, width=128, length=64, dropout=0.1)
    images = torch.randn(ROWS, 3, 48, 48)
    return {
        "GPT": ["--data", str(folder / "bytes"), "--layers", "8", "--width", "128", "--length", "64", "--rows", str(ROWS)],
        "exported GPT, dropout": export(folder, "transformer", transformer, text[:rows, :-1], text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        "exported convolutions": export(folder, "convolutions", Convolutions(), images[:rows], images, torch.randint(10, (ROWS,))),
    }


if __name__ == "__main__":
    subject, folder, *rest = sys.argv[1:]
    if subject == "layers":
        export_layers(pathlib.Path(folder), "large", WIDTH)
        export_layers(pathlib.Path(folder), "tiny", 16)
    else:
        print(json.dumps(training_words(pathlib.Path(folder), *map(int, rest))))
