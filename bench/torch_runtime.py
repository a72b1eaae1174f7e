"""Measures steps of torch.distributed.pipelining on two processes with Gloo, one thread each.

bench/runtime.py talks to it: see torch_ranks.py.

    overhead SCHEDULE MICROBATCHES STEPS   seconds for a step, the median of STEPS, on tiny stages
    transformer MICROBATCHES STEPS         the same for 1F1B with the transformer of bench/transformer.h
    memory MICROBATCHES                    bytes of memory that 1F1B had at most, both ranks together, without the batch
"""

import pathlib

import gpt
import torch_ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

BYTES, LENGTH, WIDE, TEXT_ROWS = 256, 128, 256, 2
MEMORY_ROWS, MEMORY_WIDE, MEMORY_STEPS = 1024, 64, 3


class Embedding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = torch.nn.Embedding(BYTES, WIDE)
        self.places = torch.nn.Parameter(torch.randn(LENGTH, WIDE))

    def forward(self, ids):
        return self.bytes(ids) + self.places


def indices_of(name, rank):
    """The number of stages, and which of them a rank has."""
    if name == "1F1B":
        return 2, [rank]
    return 4, [rank, 3 - rank] if name == "ZBVZeroBubble" else [rank, rank + 2]


def linear_schedule(name, rank, microbatches, rows, wide):
    count, indices = indices_of(name, rank)
    stages = []
    for index in indices:
        inputs = torch.zeros(rows, wide, requires_grad=index > 0)
        outputs = torch.zeros(rows, wide, requires_grad=True)
        module = torch.nn.Linear(wide, wide)
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), input_args=(inputs,), output_args=(outputs,)))
    kind = get_schedule_class(name)
    return kind(stages[0] if name == "1F1B" else stages, microbatches, loss_fn=F.mse_loss), stages


def transformer_schedule(rank, microbatches):
    if rank == 0:
        layers, inputs = [Embedding(), gpt.Block(WIDE), gpt.Block(WIDE)], torch.zeros(TEXT_ROWS, LENGTH, dtype=torch.int64)
    else:
        layers = [gpt.Block(WIDE), gpt.Block(WIDE), torch.nn.Linear(WIDE, BYTES)]
        inputs = torch.zeros(TEXT_ROWS, LENGTH, WIDE, requires_grad=True)
    outputs = torch.zeros(TEXT_ROWS, LENGTH, WIDE if rank == 0 else BYTES, requires_grad=True)
    module = torch.nn.Sequential(*layers)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), input_args=(inputs,), output_args=(outputs,))
    return get_schedule_class("1F1B")(stage, microbatches, loss_fn=gpt.cross_entropy), [stage]


def time_overhead(rank, name, microbatches, steps):
    microbatches, wide = int(microbatches), 16
    schedule, stages = linear_schedule(name, rank, microbatches, 1, wide)
    x, y = torch.randn(microbatches, wide), torch.randn(microbatches, wide)
    return torch_ranks.seconds_for_a_step(schedule, stages, x, y, int(steps))


def time_transformer(rank, microbatches, steps):
    schedule, stages = transformer_schedule(rank, int(microbatches))
    text = torch.randint(BYTES, (TEXT_ROWS * int(microbatches), LENGTH + 1))
    return torch_ranks.seconds_for_a_step(schedule, stages, text[:, :-1], text[:, 1:], int(steps))


def peak_bytes():
    """Returns the peak memory of this process since reset_peak()."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def reset_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def memory_of_steps(rank, microbatches):
    schedule, stages = linear_schedule("1F1B", rank, int(microbatches), MEMORY_ROWS, MEMORY_WIDE)
    # The batch on one rank, the target on the other.
    batch = torch.randn(MEMORY_ROWS * int(microbatches), MEMORY_WIDE)
    reset_peak()
    for _ in range(MEMORY_STEPS):
        torch_ranks.step(schedule, stages, batch, batch)
    total = torch.tensor(peak_bytes() - batch.nbytes)
    dist.all_reduce(total)
    return total.item()


ANSWERS = {"overhead": time_overhead, "transformer": time_transformer, "memory": memory_of_steps}


if __name__ == "__main__":
    torch_ranks.answer(__file__, ANSWERS)
