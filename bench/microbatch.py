"""Benchmarks splitting and merging of microbatches, compared with torch.distributed.pipelining.

    microbatch.py --bench build/release/bin/penstock_microbatch_bench [--runs 15]

Runs in a Python with torch, on one thread each.
"""

import argparse
import ctypes
import gc
import statistics
import sys
import time
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

from measure import Answering, print_table, ratio_of, report_goals, with_noise

TENSORS = 4
CHUNKS = 64
# Rows, columns, and True if the tensors are leaves that require grad. Merging wide tensors is mostly copying, and splitting
# leaves that require grad is mostly libtorch's creation of a graph node for each chunk, for Penstock and PyTorch alike.
CASES = ((512, 16, False), (512, 64, False), (512, 256, False), (512, 64, True))
# Repetitions of a case in a run, of which the median counts: on a busy machine most short ones are undisturbed.
REPEATS = 21


def keep_freed_memory():
    """Keeps freed memory in malloc. Otherwise it is random which of the two processes gets new pages for merged tensors."""
    malloc_trim_threshold, malloc_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    libc.mallopt(malloc_mmap_threshold, 1 << 30)
    libc.mallopt(malloc_trim_threshold, 1 << 30)


def torch_seconds(rows, columns, grad):
    args = tuple(torch.rand(rows, columns, requires_grad=grad) for _ in range(TENSORS))
    spec = tuple(TensorChunkSpec(0) for _ in args)
    splitting, merging = [], []
    # Collect the garbage of the last case now, outside of the measured time.
    gc.collect()
    for _ in range(REPEATS):
        start = time.perf_counter()
        chunks, _ = split_args_kwargs_into_chunks(args, {}, CHUNKS, spec)
        between = time.perf_counter()
        merged = merge_chunks(chunks, spec)
        merging.append(time.perf_counter() - between)
        splitting.append(between - start)
        del chunks, merged
    return statistics.median(splitting), statistics.median(merging)


def our_seconds(bench, rows, columns, grad):
    return bench.numbers(2, TENSORS, rows, columns, int(grad), CHUNKS, REPEATS)


def rows_of(case, ours, theirs):
    """Returns the rows of the table, and the ratio of both together."""
    rows, columns, grad = case
    name = f"{rows}x{columns}{', requires grad' if grad else ''}"
    table = []
    for what, part in (("split", slice(0, 1)), ("merge", slice(1, 2)), ("both", slice(2))):
        times = [[sum(run[part]) for run in runs] for runs in (ours, theirs)]
        ratio = ratio_of(times[1], times[0])
        table.append((name, what, *map(with_noise, times), f"{ratio:.1f}x"))
    return table, ratio


def main():
    arguments = argparse.ArgumentParser(description="Times our microbatches compared with PyTorch's.")
    arguments.add_argument("--bench", required=True, help="the penstock_microbatch_bench program")
    arguments.add_argument("--runs", type=int, default=15, help=f"number of runs of each case, with {REPEATS} repetitions each (default: %(default)s)")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs is at least 1")

    torch.set_num_threads(1)
    keep_freed_memory()
    # Exclude the objects of torch itself from garbage collection.
    gc.collect()
    gc.freeze()
    ratios = {}
    table = [(f"{TENSORS} float32 tensors", f"{CHUNKS} chunks", "ours", "PyTorch", "ratio")]
    with Answering(options.bench) as bench:
        for case in CASES:
            # Warm up caches and allocators.
            our_seconds(bench, *case)
            torch_seconds(*case)
            ours, theirs = [], []
            for _ in range(options.runs):
                ours.append(our_seconds(bench, *case))
                theirs.append(torch_seconds(*case))
            rows, ratio = rows_of(case, ours, theirs)
            table += rows
            ratios[case] = ratio
    print(f"Split and merged, one thread, median of {options.runs} runs (fastest–slowest)\n")
    print_table(table)
    return report_goals({"512x64 split and merged at least 4 times as fast as by PyTorch": ratios[512, 64, False] >= 4})


if __name__ == "__main__":
    sys.exit(main())
