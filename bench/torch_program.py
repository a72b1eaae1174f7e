"""Measures the GPT of gpt.py under eager PyTorch, and cut by torch.distributed.pipelining.

bench/program.py starts it; torch_ranks.py describes the protocol.

    eager CASE THREADS STEPS                          seconds for a forward and backward of a microbatch, on rank 0 alone
    pipeline CASE SCHEDULE STAGES MICROBATCHES STEPS  seconds for a step on two ranks
"""

import statistics
import time

import gpt
import torch_ranks
import torch
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import get_schedule_class


def time_eager(rank, case, threads, steps):
    if rank > 0:
        return None
    torch.set_num_threads(int(threads))
    model, _ = gpt.make(case)
    ids, target = gpt.text_for(case, 1)
    times = []
    for _ in range(int(steps) + 2):
        model.zero_grad()
        start = time.perf_counter()
        gpt.cross_entropy(model(ids), target).backward()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(1)
    return statistics.median(times[2:])


def time_pipeline(rank, case, name, stages, microbatches, steps):
    stages, microbatches = int(stages), int(microbatches)
    model, example = gpt.make(case)
    cuts = {f"blocks.{gpt.LAYERS * i // stages}": SplitPoint.BEGINNING for i in range(1, stages)}
    pipe = pipeline(model, (example,), split_spec=cuts)
    own = [pipe.build_stage(i, torch.device("cpu")) for i in range(rank, stages, 2)]
    kind = get_schedule_class(name)
    schedule = kind(own[0] if name == "1F1B" else own, microbatches, loss_fn=gpt.cross_entropy)
    ids, target = gpt.text_for(case, microbatches)
    return torch_ranks.seconds_for_a_step(schedule, own, ids, target, int(steps))


if __name__ == "__main__":
    torch_ranks.answer(__file__, {"eager": time_eager, "pipeline": time_pipeline})
