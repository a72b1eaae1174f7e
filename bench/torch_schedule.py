"""Times torch.distributed.pipelining at making and lowering ScheduleInterleaved1F1B.

Reads lines `RANKS STAGES_PER_RANK MICROBATCHES`, answers each with the seconds that the constructor took, and ends with
its input. Importing torch is not in them. bench/schedule.py talks to it.
"""

import gc
import sys
import time
import types
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from torch.distributed.pipelining import ScheduleInterleaved1F1B


def seconds_to_construct(ranks, stages_per_rank, microbatches):
    # Only the attributes of rank 0's stages that the constructor reads. It makes the actions of all ranks, on every rank.
    stages = [
        types.SimpleNamespace(num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]
    # Collect the garbage of the last case now, outside of the measured time.
    gc.collect()
    start = time.perf_counter()
    ScheduleInterleaved1F1B(stages, microbatches)
    return time.perf_counter() - start


# Nor is torch to be looked through at every collection.
gc.collect()
gc.freeze()
for line in sys.stdin:
    print(seconds_to_construct(*map(int, line.split())), flush=True)
