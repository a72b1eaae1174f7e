"""Lets torch.distributed.pipelining  train small models on two processes, for our tests to compare.

    pipeline_reference.py OUTDIR

Each rank writes OUTDIR/rank0.pt or rank1.pt, a list of dicts, one for each schedule and model:

    schedule, model, microbatches   what ran
    x, y                            the batch, the same in each step
    stages                          by index, as text: a dict of `weights`, a list of tensors before the first step, and
                                    `gradients`, a list for each step of a list of tensors
    losses                          for each step a list by microbatch, on the rank with the last stage; else empty

The optimizer is plain descent, with a rate of 0.5. Models are "perceptron", y = tanh(x W + b) in each stage, and "pair",
of two tensors: (x, z) -> (tanh(x W + z), z * s), and x + z at the end.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

WIDE, ROWS, STEPS, RATE = 8, 2, 5, 0.5
SINGLE = ("GPipe", "1F1B")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
V = ("ZBVZeroBubble", "DualPipeV")


class Perceptron(torch.nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(WIDE, WIDE, generator=generator) * 0.3)
        self.b = torch.nn.Parameter(torch.randn(WIDE, generator=generator) * 0.3)

    def forward(self, x):
        return torch.tanh(torch.addmm(self.b, x, self.w))


class Pair(torch.nn.Module):
    def __init__(self, generator, first, last):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(WIDE, WIDE, generator=generator) * 0.3)
        self.s = torch.nn.Parameter(torch.randn(WIDE, generator=generator) * 0.3)
        self.first, self.last = first, last

    def forward(self, x, z=None):
        z = x * self.s if self.first else z * self.s
        y = torch.tanh(x @ self.w + z)
        return y + z if self.last else (y, z)


def local_stages(schedule, rank):
    if schedule in SINGLE:
        return 2, [rank]
    return 4, [rank, 3 - rank] if schedule in V else [rank, rank + 2]


def train(schedule, model, microbatches, rank):
    count, indices = local_stages(schedule, rank)
    stages, made = [], {}
    for index in indices:
        generator = torch.Generator().manual_seed(index)
        first, last = index == 0, index == count - 1
        module = Perceptron(generator) if model == "perceptron" else Pair(generator, first, last)
        one = torch.zeros(ROWS, WIDE, requires_grad=True)
        boundary = (one,) if model == "perceptron" else (one, one)
        inputs = (torch.zeros(ROWS, WIDE),) if first else boundary
        outputs = (one,) if last else boundary
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), input_args=inputs, output_args=outputs))
        weights = [parameter.detach().clone() for parameter in module.parameters()]
        made[str(index)] = {"weights": weights, "gradients": []}
    run = get_schedule_class(schedule)(
        stages[0] if schedule in SINGLE else stages, microbatches, loss_fn=torch.nn.functional.mse_loss
    )
    data = torch.Generator().manual_seed(100)
    x, y = (torch.randn(ROWS * microbatches, WIDE, generator=data) for _ in range(2))
    has_first, has_last = 0 in indices, count - 1 in indices
    losses = []
    for _ in range(STEPS):
        own = []
        run.step(*((x,) if has_first else ()), target=y if has_last else None, losses=own if has_last else None)
        losses.append([loss.detach().clone() for loss in own])
        for index, stage in zip(indices, stages):
            parameters = list(stage.submod.parameters())
            made[str(index)]["gradients"].append([parameter.grad.clone() for parameter in parameters])
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
    return {
        "schedule": schedule,
        "model": model,
        "microbatches": microbatches,
        "x": x,
        "y": y,
        "stages": made,
        "losses": losses if has_last else [],
    }


def serve(rank, folder, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    records = [
        train(schedule, model, microbatches, rank)
        for schedule in (*SINGLE, *LOOPED, *V)
        for model in ("perceptron", "pair")
        for microbatches in (4, 8)
    ]
    torch.save(records, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def main():
    arguments = argparse.ArgumentParser(description="Lets PyTorch train small models, for our tests to compare.")
    arguments.add_argument("folder", type=pathlib.Path)
    arguments.add_argument("--store", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.store:
        serve(1, options.folder, options.store)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        other = subprocess.Popen([sys.executable, __file__, str(options.folder), "--store", store])
        try:
            serve(0, options.folder, store)
            if other.wait(timeout=120) != 0:
                sys.exit("pipeline_reference.py: rank 1 has failed")
        finally:
            other.kill()
            other.wait()


if __name__ == "__main__":
    main()
