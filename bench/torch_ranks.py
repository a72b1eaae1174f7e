"""Common parts of the measurements of torch.distributed.pipelining: two processes with Gloo, one thread each.

They read lines, answer each with a line, and end with their input. Rank 1 is the same program, started by rank 0.
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


def step(schedule, stages, x, y):
    args = (x,) if any(stage.is_first for stage in stages) else ()
    target = y if any(stage.is_last for stage in stages) else None
    schedule.step(*args, target=target, return_outputs=False)


def seconds_for_a_step(schedule, stages, x, y, steps):
    times = []
    for _ in range(steps + 2):
        for stage in stages:
            stage.submod.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        step(schedule, stages, x, y)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def serve(answers, rank, store, tell_other=lambda line: None):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for line in sys.stdin:
        tell_other(line)
        what, *words = line.split()
        answer = answers[what](rank, *words)
        if rank == 0:
            print(answer, flush=True)
    dist.destroy_process_group()


def answer(program, answers):
    """For each line "NAME ARGUMENT…" of the input, calls answers[NAME](rank, ARGUMENT…) on both ranks and prints rank 0's result."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if len(sys.argv) == 2:
        serve(answers, 1, sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        other = subprocess.Popen([sys.executable, "-W", "ignore", program, store], stdin=subprocess.PIPE, text=True)
        try:
            serve(answers, 0, store, lambda line: print(line, end="", file=other.stdin, flush=True))
        finally:
            other.stdin.close()
            other.wait(timeout=60)
