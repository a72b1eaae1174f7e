"""Measures training steps of the GPT of examples/ under torch.distributed.pipelining: forward, backward,
clipping and AdamW.

bench/train.py and bench/memory.py start it; torch_ranks.py describes the protocol.

    train LAYERS WIDTH LENGTH ROWS SCHEDULE MICROBATCHES STEPS   seconds for a step on two ranks, one stage each
    memory LAYERS … STEPS none|all   the same for a schedule with any stages, and the peak memory of the larger process in
                                     bytes; with "all", torch.utils.checkpoint recomputes each block
"""

import resource
import statistics
import time

import gpt
import torch_ranks
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.utils.checkpoint import checkpoint


def seconds_for_training(schedule, stages, rows, length, steps):
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    text = torch.randint(gpt.BYTES, (rows, length + 1))
    ids, target = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    times = []
    for _ in range(steps + 2):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        torch_ranks.step(schedule, stages, ids, target)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def time_training(rank, layers, width, length, rows, name, microbatches, steps):
    layers, width, length, rows, microbatches = map(int, (layers, width, length, rows, microbatches))
    torch.manual_seed(0)
    model = gpt.GPT(layers, width, length)
    example = torch.zeros(rows // microbatches, length, dtype=torch.int64)
    pipe = pipeline(model, (example,), split_spec={f"blocks.{layers // 2}": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = get_schedule_class(name)(stage, microbatches, loss_fn=gpt.cross_entropy)
    return seconds_for_training(schedule, [stage], rows, length, int(steps))


class Recomputed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Part(torch.nn.Module):
    """A stage of the GPT: some of its blocks, with the embedding before the first and the head after the last."""

    def __init__(self, model, stage, stages, recompute):
        super().__init__()
        blocks = model.blocks[len(model.blocks) * stage // stages : len(model.blocks) * (stage + 1) // stages]
        self.blocks = torch.nn.ModuleList(map(Recomputed, blocks) if recompute == "all" else blocks)
        self.bytes, self.places = (model.bytes, model.places) if stage == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if stage == stages - 1 else (None, None)

    def forward(self, x):
        if self.bytes is not None:
            x = self.bytes(x) + self.places
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def measure_memory(rank, layers, width, length, rows, name, microbatches, steps, recompute):
    layers, width, length, rows, microbatches = map(int, (layers, width, length, rows, microbatches))
    torch.manual_seed(0)
    kind = get_schedule_class(name)
    is_single = issubclass(kind, PipelineScheduleSingle)
    own = [rank] if is_single else [rank, 3 - rank]
    count = 2 if is_single else 4
    model = gpt.GPT(layers, width, length)
    ids = torch.zeros(rows // microbatches, length, dtype=torch.int64)
    between, logits = (torch.zeros(*ids.shape, wide, requires_grad=True) for wide in (width, gpt.BYTES))
    stages = []
    for stage in own:
        given, made = ids if stage == 0 else between, logits if stage == count - 1 else between
        part = Part(model, stage, count, recompute)
        stages.append(PipelineStage(part, stage, count, torch.device("cpu"), input_args=(given,), output_args=(made,)))
    del model
    schedule = kind(stages[0] if is_single else stages, microbatches, loss_fn=gpt.cross_entropy)
    seconds = seconds_for_training(schedule, stages, rows, length, int(steps))
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return f"{seconds} {peak.item()}"


if __name__ == "__main__":
    torch_ranks.answer(__file__, {"train": time_training, "memory": measure_memory})
