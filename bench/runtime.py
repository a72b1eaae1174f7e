"""Benchmarks time and memory of a step, compared with torch.distributed.pipelining and with a loop without an executor.

    runtime.py --bench build/release/bin/penstock_runtime_bench [--runs 5]

Needs a Python with torch. Penstock runs two thread ranks or, where a row says so, two process ranks on Gloo; PyTorch always
runs two processes on Gloo, as it has no thread ranks.
"""

import argparse
import pathlib
import statistics
import sys

from measure import Answering, print_table, ratio_of, report_goals, with_noise

MICROBATCHES = 64
STEPS = 15
# Goal: this many times as fast as PyTorch.
OVERHEAD = {"1F1B": 4, "Interleaved1F1B": 8, "InterleavedZeroBubble": 8, "ZBVZeroBubble": 8}
PROCESSES = 2
# Turns of loop and executor in each run, short enough that other load on the machine affects both.
TURNS = 8
TURN_STEPS = 5
TRANSFORMER_MICROBATCHES = 8
TRANSFORMER_STEPS = 3
FEW, MANY = 16, 1024
# Two linear layers of 3072 have 72 MiB of weights.
ACCUMULATE_WIDE = 3072
ACCUMULATE_STEPS = 15
MEBIBYTE = 2**20


def compare_overhead(bench, pytorch, runs):
    rows, reached = [("2 ranks, 64 microbatches of one row, linear 16", "ours", "PyTorch", "ratio", "goal")], {}
    for schedule, threads_goal in OVERHEAD.items():
        threads, processes, theirs = [], [], []
        for _ in range(runs):
            threads += bench.numbers(1, "overhead", schedule, MICROBATCHES, STEPS)
            theirs += pytorch.numbers(1, "overhead", schedule, MICROBATCHES, STEPS)
            processes += bench.numbers(1, "processes", schedule, MICROBATCHES, STEPS)
        for what, ours, goal in (("threads", threads, threads_goal), ("processes", processes, PROCESSES)):
            ratio = ratio_of(theirs, ours)
            rows.append((f"{schedule}, {what}", with_noise(ours), with_noise(theirs), f"{ratio:.1f}x", f"{goal}x"))
            reached[f"{schedule} on {what} at least {goal} times as fast as PyTorch"] = ratio >= goal
    print_table(rows)
    return reached


def compare_bare(bench, runs):
    bare, one = [], []
    for _ in range(runs * TURNS):
        bare += bench.numbers(1, "bare", MICROBATCHES, 256, 32, TURN_STEPS)
        one += bench.numbers(1, "one", MICROBATCHES, 256, 32, TURN_STEPS)
    added = ratio_of(one, bare) - 1
    print_table(
        [
            ("one rank, 64 microbatches of 32 x 256, linear 256", "time", "more", "goal"),
            ("a bare loop", with_noise(bare), "", ""),
            ("the executor", with_noise(one), f"{100 * added:.1f} %", "< 10 %"),
        ]
    )
    return {"the executor adds less than 10 % to a bare loop": added < 0.1}


def compare_transformer(bench, pytorch, runs):
    ours, simulated, theirs = [], [], []
    for _ in range(runs):
        seconds, quotient = bench.numbers(2, "transformer", TRANSFORMER_MICROBATCHES, TRANSFORMER_STEPS)
        ours.append(seconds)
        simulated.append(quotient)
        theirs += pytorch.numbers(1, "transformer", TRANSFORMER_MICROBATCHES, TRANSFORMER_STEPS)
    ratio, quotient = ratio_of(theirs, ours), statistics.median(simulated)
    noise = f"{min(simulated):.2f}–{max(simulated):.2f}"
    print_table(
        [
            ("a transformer, 2 ranks, 8 microbatches of 2 x 128", "ours", "PyTorch", "ratio", "goal"),
            ("1F1B", with_noise(ours), with_noise(theirs), f"{ratio:.2f}x", "1x"),
            ("simulated ÷ measured makespan", f"{quotient:.2f} ({noise})", "", "", "0.9"),
        ]
    )
    return {
        "the transformer at least as fast as PyTorch's": ratio >= 1,
        "the transformer's simulated makespan at least 0.9 of the measured one": quotient >= 0.9,
    }


def compare_accumulation(benches, runs):
    """`benches` are named commands: this build's first, and perhaps another's."""
    cases = {(next(iter(benches)), "cleared"): ([], [])} | {(name, "accumulate"): ([], []) for name in benches}
    for _ in range(runs):
        for (name, question), (times, peaks) in cases.items():
            with Answering(*benches[name]) as answering:
                seconds, peak = answering.numbers(2, question, ACCUMULATE_WIDE, ACCUMULATE_STEPS)
            times.append(seconds)
            peaks.append(peak / MEBIBYTE)
    rows = [("1F1B, 2 ranks, 4 microbatches of one row, 72 MiB of weights", "time", "memory of a step")]
    labels = {"cleared": "without gradients before it", "accumulate": "adding to gradients"}
    for (name, question), (times, peaks) in cases.items():
        rows.append((f"a step {labels[question]}, {name}", with_noise(times), f"{statistics.median(peaks):.0f} MiB"))
    print_table(rows)
    return {}


def peak_of(command, microbatches):
    """Returns the peak memory of a new process, in MiB."""
    with Answering(*command) as answering:
        return answering.numbers(1, "memory", microbatches)[0] / MEBIBYTE


def compare_memory(bench, pytorch, runs):
    commands = {"ours": bench, "PyTorch": pytorch}
    peaks = {(who, count): [] for who in commands for count in (FEW, MANY)}
    for _ in range(runs):
        for (who, count), found in peaks.items():
            found.append(peak_of(commands[who], count))
    middle = {case: statistics.median(found) for case, found in peaks.items()}
    growth = {who: middle[who, MANY] - middle[who, FEW] for who in commands}

    def shown(who, count):
        found = peaks[who, count]
        return f"{middle[who, count]:.1f} MiB ({min(found):.1f}–{max(found):.1f})"

    rows = [("1F1B, 2 ranks, 256 KiB between stages: peak memory without the batch", *commands, "goal")]
    rows += [(f"{count:,} microbatches", *(shown(who, count) for who in commands), "") for count in (FEW, MANY)]
    rows.append(("growth", *(f"{growth[who]:.1f} MiB" for who in commands), "< 5 MiB"))
    print_table(rows)
    return {"1,024 microbatches take less than 5 MiB more than 16": growth["ours"] < 5}


def main():
    arguments = argparse.ArgumentParser(description="Benchmarks the executor, compared with PyTorch.")
    arguments.add_argument("--bench", required=True, help="the penstock_runtime_bench program")
    arguments.add_argument("--runs", type=int, default=5, help="of each case (default: %(default)s)")
    arguments.add_argument("--other", help="the same program of another build, to compare the accumulation of gradients")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs must be at least 1")

    bench = (options.bench,)
    pytorch = (sys.executable, str(pathlib.Path(__file__).with_name("torch_runtime.py")))
    print(f"A step, median of {options.runs} runs (fastest–slowest)\n")
    with Answering(*bench) as answering, Answering(*pytorch) as answering_torch:
        goals = compare_overhead(answering, answering_torch, options.runs)
        print()
        goals |= compare_bare(answering, options.runs)
        print()
        goals |= compare_transformer(answering, answering_torch, options.runs)
    print()
    benches = {"this build": bench} | ({"other build": (options.other,)} if options.other else {})
    goals |= compare_accumulation(benches, options.runs)
    print()
    goals |= compare_memory(bench, pytorch, options.runs)
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(main())
