"""Times steps of torch.distributed.pipelining ("the peer") on two processes with Gloo, on tiny stages.

Reads lines `SCHEDULE MICROBATCHES STEPS`, answers each with the seconds for a step, the median of STEPS, and ends with its
input. bench/runtime.py talks to it. Rank 1 is this program too, started by rank 0.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

warnings.filterwarnings("ignore")

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

WIDE = 16
# Schedules and the stages of a rank by index.
SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def stages_of(name, rank):
    if name == "1F1B":
        return 2, [rank]
    return 4, [rank, 3 - rank] if name == "ZBVZeroBubble" else [rank, rank + 2]


def make_schedule(name, rank, microbatches):
    count, indices = stages_of(name, rank)
    stages = []
    for index in indices:
        inputs = torch.zeros(1, WIDE, requires_grad=index > 0)
        outputs = torch.zeros(1, WIDE, requires_grad=True)
        module = torch.nn.Linear(WIDE, WIDE)
        stages.append(PipelineStage(module, index, count, torch.device("cpu"), input_args=(inputs,), output_args=(outputs,)))
    kind = get_schedule_class(name)
    return kind(stages[0] if name == "1F1B" else stages, microbatches, loss_fn=torch.nn.functional.mse_loss), stages


def seconds_for_a_step(name, rank, microbatches, steps):
    schedule, stages = make_schedule(name, rank, microbatches)
    x, y = torch.randn(microbatches, WIDE), torch.randn(microbatches, WIDE)
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    times = []
    for _ in range(steps + 2):
        for stage in stages:
            stage.submod.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*((x,) if has_first else ()), target=y if has_last else None, return_outputs=False)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def serve(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    while True:
        question = torch.zeros(3, dtype=torch.int64)
        if rank == 0:
            line = sys.stdin.readline().split()
            if line:
                question = torch.tensor([SCHEDULES.index(line[0]), int(line[1]), int(line[2])])
        dist.broadcast(question, 0)
        kind, microbatches, steps = question.tolist()
        if steps == 0:
            break
        answer = seconds_for_a_step(SCHEDULES[kind], rank, microbatches, steps)
        if rank == 0:
            print(answer, flush=True)
    dist.destroy_process_group()


def main():
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if len(sys.argv) == 2:
        serve(1, sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        other = subprocess.Popen([sys.executable, __file__, store], stdin=subprocess.DEVNULL)
        try:
            serve(0, store)
        finally:
            other.wait(timeout=60)


if __name__ == "__main__":
    main()
