"""Measures how fast schedules are generated, lowered and simulated, compared with torch.distributed.pipelining.

    schedule.py --bench build/release/bin/penstock_schedule_bench [--python .venv/bin/python] [--runs 3]
"""

import argparse
import pathlib
import statistics
import sys

from measure import Answering, print_table, ratio_of, report_goals, with_noise

LOWERED = ((4, 2, 16), (8, 2, 64), (8, 2, 256), (16, 2, 512), (32, 4, 256))
# Number of runs of Penstock for each run of PyTorch.
REPEATED = 7
SIMULATED = ((8, 2, 256), (32, 4, 256), (1024, 2, 4096))


def size(case):
    return "x".join(map(str, case))


def compare_lowering(bench, pytorch, runs):
    rows = [("ranks x stages per rank x microbatches", "ours", "PyTorch", "ratio")]
    # A warm-up run fills caches and allocators.
    bench.numbers(1, "lower", 4, 2, 8)
    pytorch.numbers(1, 4, 2, 8)
    for case in LOWERED:
        ours, theirs = [], []
        for _ in range(runs):
            # Runs of milliseconds are repeated, or they would measure the caches that the other program left.
            ours += [bench.numbers(1, "lower", *case)[0] for _ in range(REPEATED)]
            theirs += pytorch.numbers(1, *case)
        ratio = ratio_of(theirs, ours)
        rows.append((size(case), with_noise(ours), with_noise(theirs), f"{ratio:.0f}x"))
    print_table(rows)
    # The ratio of the last case, which is the largest.
    return ratio


def measure_simulation(path, runs):
    rows = [("ranks x stages per rank x microbatches", "actions", "time", "million actions/s", "peak memory")]
    slowest = float("inf")
    for case in SIMULATED:
        times = []
        for _ in range(runs):
            # A process for each run, as the peak memory is that of the whole process.
            with Answering(path) as bench:
                seconds, actions, peak = bench.numbers(3, "simulate", *case)
            times.append(seconds)
        speed = actions / statistics.median(times) / 1e6
        rows.append((size(case), f"{actions:,.0f}", with_noise(times), f"{speed:.1f}", f"{peak / 2**30:.2f} GiB"))
        slowest = min(slowest, speed)
    print_table(rows)
    return slowest, peak / 2**30


def main():
    arguments = argparse.ArgumentParser(description="Compares the speed of schedules with PyTorch's.")
    arguments.add_argument("--bench", required=True, help="path of the penstock_schedule_bench program")
    arguments.add_argument("--python", default=sys.executable, help="Python with torch (default: this one)")
    arguments.add_argument("--runs", type=int, default=3, help="number of runs of each case (default: %(default)s)")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs must be at least 1")

    pytorch = pathlib.Path(__file__).with_name("torch_schedule.py")
    print(f"Interleaved1F1B, median of {options.runs} runs (fastest–slowest)\n")
    print("generated and lowered")
    with Answering(options.bench) as bench, Answering(options.python, str(pytorch)) as answering_torch:
        ratio = compare_lowering(bench, answering_torch, options.runs)
    print("\nsimulated, lowered")
    speed, memory = measure_simulation(options.bench, options.runs)
    goals = {
        "lowering at least 100 times as fast as PyTorch": ratio >= 100,
        "simulation of at least 5 million actions a second": speed >= 5,
        "the largest schedule in less than 4 GiB": memory < 4,
    }
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(main())
