"""Trains models with plain PyTorch in one process, as a reference for Trainer.

    trainer_reference.py DIR

Writes DIR/training.safetensors for the GPT of examples/: its initial weights "weight.NAME", the batches "ids.I" and
"target.I" of each step, and the "losses" before each step. The optimizer is AdamW with decoupled decay, gradients are
clipped at 0.5, and the learning rate is warmed up in 10 of 50 steps and falls along a cosine to a twentieth.

Writes DIR/weighted.safetensors for the same GPT on batches of 13 rows: "ids.I" and "target.I", of which some are -100,
and for each number N of batches per step the loss "loss.N" of all of them at once, the norm "norm.N" of its gradients,
and the gradients "grad.N.NAME".

Writes DIR/strange.pt2, a model with complex parameters and sparse gradients, and strange.safetensors: its batches, and
the losses "losses.NAME" with each optimizer at a constant learning rate.
"""

import copy
import math
import pathlib
import sys

here = pathlib.Path(__file__).resolve().parent
sys.path += [str(here.parent / "program"), str(here.parent.parent / "examples")]

import exporting  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from export_gpt import GPT  # noqa: E402

STEPS, WARMUP, RATE, LEAST, MICROBATCHES = 50, 10, 4e-3, 0.05, 4


def rate_of(step):
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - 1 - WARMUP)
    return RATE * (LEAST + (1 - LEAST) * (1 + math.cos(math.pi * done)) / 2)


class Strange(torch.nn.Module):
    """An embedding with sparse gradients whose weight the head shares, and a complex parameter that rotates numbers."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 6, sparse=True)
        self.turn = torch.nn.Parameter(torch.randn(6, dtype=torch.cfloat))
        self.head = torch.nn.Linear(6, 10)
        self.head.weight = self.table.weight

    def forward(self, ids):
        turned = self.turn * self.table(ids).to(torch.cfloat)
        return self.head(torch.tanh(turned.real + turned.imag))


def write_strange(folder):
    ids, target = torch.randint(10, (2, 12, 8, 3)).unbind()
    values = {}
    for step in range(12):
        values |= {f"ids.{step}": ids[step].clone(), f"target.{step}": target[step].clone()}
    first = Strange()
    torch.export.save(torch.export.export(first.train(), (ids[0, :2],)), folder / "strange.pt2")
    for name, make in {"sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
                       "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.98), weight_decay=0.01),
                       "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.98), weight_decay=0.01)}.items():
        model = copy.deepcopy(first)
        optimizer = make(model.parameters())
        losses = [stepped(model, optimizer, ids[i], target[i]) for i in range(12)]
        values[f"losses.{name}"] = torch.tensor(losses, dtype=torch.float64)
    exporting.save_tensors(values, folder / "strange.safetensors")


def write_weighted(folder):
    """Writes batches that do not divide evenly, with ignored targets: single bytes, rows, and whole microbatches."""
    model = GPT(layers=2, width=16, length=12).train()
    values = {f"weight.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    ids, target = torch.randint(97, 123, (2, 4, 13, 12)).unbind()
    target[0, :, :5] = -100
    target[0, 2:5] = -100
    target[1, 4:] = -100
    target[2][torch.rand(13, 12) < 0.6] = -100
    for i in range(4):
        values |= {f"ids.{i}": ids[i].clone(), f"target.{i}": target[i].clone()}
    for count in (1, 3):
        model.zero_grad()
        output = model(ids[:count].flatten(0, 1))
        loss = F.cross_entropy(output.flatten(0, 1), target[:count].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        values |= {f"loss.{count}": loss.detach().double(), f"norm.{count}": norm.double()}
        values |= {f"grad.{count}.{name}": parameter.grad.clone() for name, parameter in model.named_parameters()}
        print(f"{count} batches of 13 rows as one: loss {loss.item():.6f}, norm {norm.item():.6f}")
    exporting.save_tensors(values, folder / "weighted.safetensors")


def stepped(model, optimizer, ids, target):
    """Steps the optimizer and returns the loss before the step."""
    optimizer.zero_grad()
    parts = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in
             zip(ids.chunk(MICROBATCHES), target.chunk(MICROBATCHES))]
    loss = sum(parts) / MICROBATCHES
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.item()


def main(folder):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    model = GPT(layers=3, width=32, length=12).train()
    values = {f"weight.{name}": tensor.detach().clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
    text = torch.randint(97, 123, (400,))
    losses = []
    for step in range(STEPS):
        rows = torch.stack([text[i : i + 13] for i in torch.randint(387, (8,))])
        ids, target = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        values |= {f"ids.{step}": ids, f"target.{step}": target}
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        losses.append(stepped(model, optimizer, ids, target))
    values["losses"] = torch.tensor(losses, dtype=torch.float64)
    exporting.save_tensors(values, folder / "training.safetensors")
    write_strange(folder)
    write_weighted(folder)
    print(f"{STEPS} steps, from a loss of {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
