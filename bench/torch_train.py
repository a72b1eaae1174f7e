"""Measures training steps of the GPT of examples/ under torch.distributed.pipelining: forward, backward,
clipping and AdamW.

bench/train.py starts it; torch_ranks.py describes the protocol.

    train LAYERS WIDTH LENGTH ROWS SCHEDULE MICROBATCHES STEPS   seconds for a step on two ranks, one stage each
"""

import statistics
import time

import gpt
import torch_ranks
import torch
import torch.distributed as dist
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining.schedules import get_schedule_class


def time_training(rank, layers, width, length, rows, name, microbatches, steps):
    layers, width, length, rows, microbatches = map(int, (layers, width, length, rows, microbatches))
    torch.manual_seed(0)
    model = gpt.GPT(layers, width, length)
    example = torch.zeros(rows // microbatches, length, dtype=torch.int64)
    pipe = pipeline(model, (example,), split_spec={f"blocks.{layers // 2}": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = get_schedule_class(name)(stage, microbatches, loss_fn=gpt.cross_entropy)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    text = torch.randint(gpt.BYTES, (rows, length + 1))
    ids, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    times = []
    for _ in range(int(steps) + 2):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        torch_ranks.step(schedule, [stage], ids, target)
        torch.nn.utils.clip_grad_norm_(stage.submod.parameters(), 1.0)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


if __name__ == "__main__":
    torch_ranks.answer(__file__, {"train": time_training})
