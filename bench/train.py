"""Benchmarks `penstock train`, compared with torch.distributed.pipelining, and on two ranks compared with one.

    train.py --penstock build/release/bin/penstock [--runs 3]

Needs a Python with torch. Penstock runs thread ranks; PyTorch runs two processes on Gloo, as it has no thread ranks. A step is
forward, backward, clipping and AdamW, with one intra-op thread per rank.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

from measure import Answering, print_table, ratio_of, report_goals, with_noise

LAYERS = 4
# Width, bytes of a row, rows of a batch, microbatches, steps; and the goal for the ratio to PyTorch.
CASES = {
    "compute-bound": (256, 128, 16, 8, 6, 1.0),
    "many small microbatches": (64, 4, 64, 64, 20, 1.0),
}
SCALING = (256, 128, 64, 32, 4)
SCALING_GOAL = 1.7


def train(penstock, folder, ranks, width, length, rows, microbatches, steps):
    """Returns the median time of a step in seconds."""
    words = {"data": folder / "text", "layers": LAYERS, "width": width, "length": length, "rows": rows, "ranks": ranks,
             "microbatches": microbatches, "steps": steps + 2, "output": folder / "run"}
    command = [penstock, "train", "--overwrite"] + [str(word) for name, value in words.items() for word in (f"--{name}", value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    return statistics.median([line["seconds"] for line in lines if "loss" in line][2:])


def main():
    arguments = argparse.ArgumentParser(description="Benchmarks training, compared with PyTorch.")
    arguments.add_argument("--penstock", required=True, help="the penstock command")
    arguments.add_argument("--runs", type=int, default=3, help="number of runs of each case (default: %(default)s)")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs must be at least 1")
    pytorch = (sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("torch_train.py")))
    print(f"A step of training, a GPT of {LAYERS} layers, 1F1B: median of {options.runs} runs (fastest–slowest)\n")
    goals = {}
    with tempfile.TemporaryDirectory() as name, Answering(*pytorch) as answering:
        folder = pathlib.Path(name)
        (folder / "text").write_bytes(random.Random(0).randbytes(100_000))
        rows = [("2 ranks", "ours", "PyTorch", "bytes/s", "ratio", "goal")]
        for what, (width, length, batch, microbatches, steps, goal) in CASES.items():
            ours, theirs = [], []
            for _ in range(options.runs):
                ours.append(train(options.penstock, folder, 2, width, length, batch, microbatches, steps))
                theirs += answering.numbers(1, "train", LAYERS, width, length, batch, "1F1B", microbatches, steps)
            ratio = ratio_of(theirs, ours)
            rate = batch * length / statistics.median(ours)
            named = f"{what}: width {width}, {batch} x {length} bytes, {microbatches} microbatches"
            rows.append((named, with_noise(ours), with_noise(theirs), f"{rate:,.0f}", f"{ratio:.2f}x", f"{goal:g}x"))
            goals[f"{what}: at least as fast as PyTorch"] = ratio >= goal
        print_table(rows)
        print()
        width, length, batch, microbatches, steps = SCALING
        one, two = [], []
        for _ in range(options.runs):
            one.append(train(options.penstock, folder, 1, *SCALING))
            two.append(train(options.penstock, folder, 2, *SCALING))
        ratio = ratio_of(one, two)
        named = f"width {width}, {batch} x {length} bytes, {microbatches} microbatches"
        print_table([("from one rank to two", "1 rank", "2 ranks", "ratio", "goal"),
                     (named, with_noise(one), with_noise(two), f"{ratio:.2f}x", f"{SCALING_GOAL}x")])
        goals[f"two ranks at least {SCALING_GOAL} times as fast as one"] = ratio >= SCALING_GOAL
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(main())
