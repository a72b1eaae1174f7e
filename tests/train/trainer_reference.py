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

Writes DIR/scaler.safetensors: the "scale" and "growth_tracker" of torch.amp.GradScaler after each of several steps, of
which "found_inf" overflow, for the options "default", "quick" and "largest"; and "inverse", its factor of gradients.

Writes DIR/half.pt2, a model that is trained under float16 autocast with a GradScaler, and half.safetensors: its batches,
and after each step the "losses", "scales" and whether it was "skipped".
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


def write_scaler(folder):
    values = {}
    options = {"default": {}, "quick": {"init_scale": 1000.0, "growth_factor": 1.7, "backoff_factor": 0.3,
                                        "growth_interval": 3}, "largest": {"init_scale": 2.0**126, "growth_interval": 1}}
    found_inf = [step in (1, 2, 9) or step % 17 == 0 for step in range(60)]
    for name, chosen in options.items():
        scaler = torch.amp.GradScaler("cpu", **chosen)
        scales, trackers, inverses = [], [], []
        for is_inf in found_inf:
            weight = torch.ones(1, requires_grad=True)
            optimizer = torch.optim.SGD([weight], lr=0.0)
            scaler.scale(weight * 0).sum().backward()
            weight.grad.fill_(math.inf if is_inf else 1)
            scaler.unscale_(optimizer)
            inverses.append(weight.grad.item() if not is_inf else 0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            trackers.append(scaler._get_growth_tracker())
        values |= {f"scale.{name}": torch.tensor(scales, dtype=torch.float64), f"growth_tracker.{name}": torch.tensor(trackers),
                   f"inverse.{name}": torch.tensor(inverses, dtype=torch.float64)}
    values["found_inf"] = torch.tensor(found_inf)
    exporting.save_tensors(values, folder / "scaler.safetensors")


class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 16), torch.nn.Linear(16, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).float()


def write_half(folder):
    model, scaler = Half(), torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
    x, y = torch.randn(20, 8, 6), torch.randn(20, 8, 3)
    torch.export.save(torch.export.export(model, (x[0][:2],)), folder / "half.pt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, scales, skipped = [], [], []
    for ids, target in zip(x, y):
        optimizer.zero_grad()
        loss = 0
        for rows, wanted in zip(ids.chunk(MICROBATCHES), target.chunk(MICROBATCHES)):
            with torch.autocast("cpu", dtype=torch.float16):
                found = model(rows)
            part = F.mse_loss(found, wanted) / MICROBATCHES
            scaler.scale(part).backward()
            loss += part.item()
        before = scaler.get_scale()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
        scales.append(before)
        skipped.append(scaler.get_scale() < before)
    values = {f"ids.{step}": x[step].clone() for step in range(len(x))}
    values |= {f"target.{step}": y[step].clone() for step in range(len(x))}
    values |= {"losses": torch.tensor(losses, dtype=torch.float64), "scales": torch.tensor(scales, dtype=torch.float64),
               "skipped": torch.tensor(skipped)}
    exporting.save_tensors(values, folder / "half.safetensors")


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
    write_scaler(folder)
    write_half(folder)
    print(f"{STEPS} steps, from a loss of {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
