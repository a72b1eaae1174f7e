"""Benchmarks exported models, compared with eager PyTorch and, in stages, with torch.distributed.pipelining.

    program.py --bench build/release/bin/penstock_program_bench [--runs 5]

Runs in a Python with torch, and exports the model there. Ours are two thread ranks; PyTorch's are two processes on
Gloo, as it has no threads.
"""

import argparse
import pathlib
import sys
import tempfile

import gpt
import torch
from measure import Answering, print_table, ratio_of, report_goals, with_noise

EAGER_STEPS = 10
WIDE_MICROBATCHES, WIDE_STEPS = 8, 3
TINY_MICROBATCHES, TINY_STEPS = 64, 10
# Goal for the ratio to PyTorch, by schedule and number of stages.
TINY_GOALS = {("1F1B", 2): 1.5, ("Interleaved1F1B", 4): 3}


def export(folder):
    for case in gpt.CASES:
        model, ids = gpt.make(case)
        torch.export.save(torch.export.export(model, (ids,)), folder / f"{case}.pt2")


def compare_eager(bench, pytorch, folder, runs):
    rows, reached = [("a GPT, 4 layers of width 256, 2 x 128 tokens, one process", "ours", "eager", "ratio", "goal")], {}
    for threads in (1, 2):
        ours, theirs = [], []
        for _ in range(runs):
            ours += bench.numbers(1, "one", folder / "wide.pt2", threads, EAGER_STEPS)
            theirs += pytorch.numbers(1, "eager", "wide", threads, EAGER_STEPS)
        ratio = ratio_of(theirs, ours)
        what = f"{threads} thread{'s' if threads > 1 else ''}"
        rows.append((what, with_noise(ours), with_noise(theirs), f"{ratio:.2f}x", "1x"))
        reached[f"one process on {what} at least as fast as eager PyTorch"] = ratio >= 1
    print_table(rows)
    return reached


def compare_torch(bench, pytorch, folder, runs):
    cases = [("wide", "1F1B", 2, WIDE_MICROBATCHES, WIDE_STEPS, 1)]
    cases += [("tiny", *case, TINY_MICROBATCHES, TINY_STEPS, goal) for case, goal in TINY_GOALS.items()]
    rows, reached = [("the same on 2 ranks", "ours", "PyTorch", "ratio", "goal")], {}
    for case, schedule, stages, microbatches, steps, goal in cases:
        ours, theirs = [], []
        for _ in range(runs):
            ours += bench.numbers(1, "pipeline", folder / f"{case}.pt2", schedule, stages, microbatches, steps)
            theirs += pytorch.numbers(1, "pipeline", case, schedule, stages, microbatches, steps)
        ratio = ratio_of(theirs, ours)
        width, batch, length = gpt.CASES[case]
        what = f"{schedule}, {microbatches} microbatches of {batch} x {length} tokens, width {width}"
        rows.append((what, with_noise(ours), with_noise(theirs), f"{ratio:.2f}x", f"{goal}x"))
        reached[f"{what}: at least {goal} times as fast as PyTorch"] = ratio >= goal
    print_table(rows)
    return reached


def main():
    arguments = argparse.ArgumentParser(description="Measures exported programs compared with eager PyTorch and torch.distributed.pipelining.")
    arguments.add_argument("--bench", required=True, help="the penstock_program_bench program")
    arguments.add_argument("--runs", type=int, default=5, help="number of runs of each case (default: %(default)s)")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs is at least 1")

    pytorch = (sys.executable, str(pathlib.Path(__file__).with_name("torch_program.py")))
    print(f"Forward and backward, median of {options.runs} runs (fastest–slowest)\n")
    with tempfile.TemporaryDirectory() as name, Answering(options.bench) as bench, Answering(*pytorch) as answering_torch:
        folder = pathlib.Path(name)
        export(folder)
        goals = compare_eager(bench, answering_torch, folder, options.runs)
        print()
        goals |= compare_torch(bench, answering_torch, folder, options.runs)
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(main())
