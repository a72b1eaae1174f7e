"""Benchmarks memory: weights of processes, recomputation compared with PyTorch's, and predictions compared with measurements.

    memory.py --penstock build/release/bin/penstock [--other OTHER/penstock] [--runs 3]

Needs a Python with torch and safetensors, 4 GB of memory and 2 GB of disk. `--other` is the command of another build, to compare
the memory of processes that hold weights.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

from measure import Answering, print_table, report_goals, short

STAGES = 4
# Weights of the large model in MiB.
WEIGHTS = 1024
# Goal for the memory of a process beyond the fixed part, in multiples of its weights.
SHARE_GOAL = 1.25
MICROBATCHES = 8
# A GPT: layers, width, bytes of a row, rows of a batch, microbatches, steps.
GPT = {"layers": 12, "width": 128, "length": 64, "rows": 64, "microbatches": MICROBATCHES, "steps": 6}
TINY = {"layers": 4, "width": 8, "length": 4, "rows": 8, "microbatches": MICROBATCHES, "steps": 4}
COMPARED = ("GPipe", "1F1B", "ZBVZeroBubble")
# The run of one schedule predicts those of the others with as many stages.
PREDICTING = {2: ("GPipe", "1F1B"), 4: ("ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B", "LoopedBFS", "DualPipeV")}
MEBIBYTE = 2**20


def peak_of(command):
    """Returns the peak memory in MiB of the command or of a process that it has started, whichever is larger."""
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {process.returncode}")
    return usage.ru_maxrss / 1024


def export(*words):
    """Exports models in a process of its own, and returns what it prints."""
    command = [sys.executable, "-W", "ignore", pathlib.Path(__file__).with_name("memory_models.py"), *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare_weights(commands, folder):
    """`commands` are named penstock commands: this build's first, and perhaps another's."""
    export("layers", folder)
    rows = [(f"`penstock run`, {WEIGHTS:,} MiB of weights in {STAGES} stages: peak of a process", "share", *commands, "÷ share", "goal")]
    reached = {}
    for count in (1, 2, 4):
        peaks, fixed = {}, {}
        schedule = "1F1B" if count == STAGES else "Interleaved1F1B"
        for name, command in commands.items():
            words = ["--stages", STAGES, "--schedule", schedule, "--ranks", count, "--microbatches", 4 * STAGES, "--transport", "gloo"]
            for model, into in (("large", peaks), ("tiny", fixed)):
                path = folder / f"{model}.pt2"
                files = ["--inputs", path.with_suffix(".safetensors"), "--output", folder / "outputs.safetensors"]
                into[name] = peak_of([command, "run", path, *files, *words])
        ours = next(iter(commands))
        share = WEIGHTS / count
        ratio = (peaks[ours] - fixed[ours]) / share
        shown = [f"{peaks[name]:,.0f} MiB ({fixed[name]:,.0f} fixed)" for name in commands]
        what = f"{count} process{'es' if count > 1 else ''}"
        rows.append((what, f"{share:,.0f} MiB", *shown, f"{ratio:.2f}", f"{SHARE_GOAL}"))
        reached[f"{what}: at most {SHARE_GOAL} times the share of the weights"] = ratio <= SHARE_GOAL
    print_table(rows)
    return reached


def train_words(penstock, folder, schedule, recompute, size, *more):
    options = {"data": folder / "text", "ranks": 2, "schedule": schedule, "recompute": recompute, "output": folder / "run"} | size
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [str(word) for word in (penstock, "train", "--overwrite", *words, *more)]


def measured_run(folder):
    """Returns the median seconds of a step of the last run, and the peak memory of each rank in bytes."""
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return statistics.median([line["seconds"] for line in steps[2:]]), steps[-1]["memory"]


def train(command, folder):
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return measured_run(folder)


def predict(penstock, costs, schedule, recompute):
    """Returns the seconds of a step, and the peak memory of each rank in bytes, under measured costs."""
    command = [penstock, "schedule", "simulate", schedule, "--ranks", "2", "--microbatches", str(MICROBATCHES), "--costs", str(costs), "--json"]
    if recompute == "stages":
        command += ["--recompute", "stages"]
    simulated = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return simulated["makespan"] / 1000, simulated["peak_bytes"]


def compare_recomputation(penstock, folder, runs):
    """Predicts steps of a GPT with recomputed stages from runs without, and compares time and memory with measurements."""
    cases = list(itertools.product(COMPARED, ("none", "stages", "all")))
    measured = {case: [] for case in cases}
    predicted = {case: [] for case in cases}
    for _ in range(runs):
        for schedule, recompute in cases:
            measured[schedule, recompute].append(train(train_words(penstock, folder, schedule, recompute, GPT), folder))
            costs = folder / f"{schedule}.json"
            # Blocks that are recomputed have sizes of their own, so these runs are predicted from themselves.
            if recompute == "all":
                costs = folder / "run/costs.json"
            elif recompute == "none":
                (folder / "run/costs.json").rename(costs)
            predicted[schedule, recompute].append(predict(penstock, costs, schedule, recompute))
    rows = [(f"a GPT of {GPT['layers']} layers of width {GPT['width']}, 2 thread ranks", "a step", "predicted", "peak memory", "predicted")]
    reached = {}
    for case in cases:
        time, expected_time = (statistics.median(seconds for seconds, _ in found[case]) for found in (measured, predicted))
        peak, expected_peak = (statistics.median(max(peaks) for _, peaks in found[case]) / MEBIBYTE for found in (measured, predicted))
        what = f"{case[0]}, --recompute {case[1]}"
        rows.append((what, short(time), f"{short(expected_time)} ({expected_time / time:.2f})",
                     f"{peak:.1f} MiB", f"{expected_peak:.1f} MiB ({expected_peak / peak:.2f})"))
        reached[f"{what}: time within 10 %"] = abs(expected_time / time - 1) <= 0.1
        reached[f"{what}: memory within 10 %"] = abs(expected_peak / peak - 1) <= 0.1
    print_table(rows)
    return reached


def compare_torch(penstock, folder, runs):
    """Compares process ranks with torch.distributed.pipelining and torch.utils.checkpoint."""
    pytorch = (sys.executable, "-W", "ignore", str(pathlib.Path(__file__).with_name("torch_train.py")))

    def ours(size, schedule, recompute):
        peak = peak_of(train_words(penstock, folder, schedule, recompute, size, "--transport", "gloo"))
        return measured_run(folder)[0], peak

    def theirs(size, schedule, recompute):
        words = [size[name] for name in ("layers", "width", "length", "rows")]
        # A process of its own for each case, as the peak of a process never falls.
        with Answering(*pytorch) as answering:
            seconds, peak = answering.numbers(2, "memory", *words, schedule, size["microbatches"], size["steps"], recompute)
        return seconds, peak / MEBIBYTE

    rows = [("the same on 2 process ranks: peak beyond that of a tiny model", "ours", "PyTorch", "ours, a step", "PyTorch", "ratio")]
    reached = {}
    for schedule, recompute in itertools.product(COMPARED, ("none", "all")):
        seconds, peaks = {ours: [], theirs: []}, {ours: [], theirs: []}
        fixed = {run: run(TINY, schedule, recompute)[1] for run in (ours, theirs)}
        for _ in range(runs):
            for run in (ours, theirs):
                time, peak = run(GPT, schedule, recompute)
                seconds[run].append(time)
                peaks[run].append(peak - fixed[run])
        what = f"{schedule}, {'every block recomputed' if recompute == 'all' else 'nothing recomputed'}"
        memory = {run: statistics.median(found) for run, found in peaks.items()}
        rows.append((what, *(f"{memory[run]:.0f} MiB" for run in (ours, theirs)),
                     *(short(statistics.median(seconds[run])) for run in (ours, theirs)),
                     f"{statistics.median(seconds[theirs]) / statistics.median(seconds[ours]):.2f}x"))
        reached[f"{what}: no more memory than PyTorch, within 5 %"] = memory[ours] <= 1.05 * memory[theirs]
    print_table(rows)
    return reached


def compare_predictions(penstock, folder):
    """Predicts the peak memory of schedules from the run of one schedule with as many stages."""
    models = json.loads(export("training", folder, MICROBATCHES))
    rows = [("peak memory of the fullest rank, MiB: predicted / measured", *models)]
    reached = {}
    for stages, schedules in PREDICTING.items():
        costs = {}
        for schedule in schedules:
            cells = []
            for name, words in models.items():
                options = ["--ranks", "2", "--schedule", schedule, "--microbatches", str(MICROBATCHES), "--steps", "4", "--stages", str(stages)]
                command = [penstock, "train", *words, *options, "--overwrite", "--output", str(folder / "run")]
                _, measured = train(command, folder)
                if schedule == schedules[0]:
                    costs[name] = folder / f"costs-{name.replace(' ', '-')}-{stages}.json"
                    (folder / "run/costs.json").rename(costs[name])
                _, predicted = predict(penstock, costs[name], schedule, "none")
                peak, expected = max(measured) / MEBIBYTE, max(predicted) / MEBIBYTE
                cells.append(f"{expected:.1f} / {peak:.1f} ({expected / peak:.2f})")
                reached[f"{schedule}, {name}: within 10 % or 1 MiB"] = abs(expected - peak) <= max(0.1 * peak, 1)
            rows.append((f"{schedule}, {stages} stages", *cells))
    print_table(rows)
    return reached


def main():
    arguments = argparse.ArgumentParser(description="Benchmarks memory, compared with PyTorch and with predictions.")
    arguments.add_argument("--penstock", required=True, help="the penstock command")
    arguments.add_argument("--other", help="the command of another build, to compare the memory of weights")
    arguments.add_argument("--runs", type=int, default=3, help="number of runs of each case (default: %(default)s)")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs must be at least 1")
    commands = {"this build": options.penstock} | ({"other build": options.other} if options.other else {})
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = pathlib.Path(name)
        (folder / "text").write_bytes(random.Random(0).randbytes(100_000))
        goals = compare_weights(commands, folder)
        print()
        goals |= compare_recomputation(options.penstock, folder, options.runs)
        print()
        goals |= compare_torch(options.penstock, folder, options.runs)
        print()
        goals |= compare_predictions(options.penstock, folder)
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(main())
