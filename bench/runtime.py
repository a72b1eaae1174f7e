"""Steps: what our executor costs, beside torch.distributed.pipelining ("the peer") on tiny stages and beside a bare loop.

    runtime.py --bench build/release/bin/penstock_runtime_bench [--runs 5]

Runs in a Python with the peer. Ours are two thread ranks, the peer's two processes on Gloo, as it has no threads.
"""

import argparse
import pathlib
import sys

from measure import Answering, print_table, ratio_of, report_goals, with_noise

MICROBATCHES = 64
STEPS = 15
# How many times as fast as the peer we want to be.
OVERHEAD = {"1F1B": 4, "Interleaved1F1B": 8, "InterleavedZeroBubble": 8, "ZBVZeroBubble": 8}


def compare_overhead(bench, peer, runs):
    rows, reached = [("2 ranks, 64 microbatches of one row, linear 16", "ours", "the peer", "ratio")], {}
    for schedule, goal in OVERHEAD.items():
        ours, theirs = [], []
        for _ in range(runs):
            ours += bench.numbers(1, "overhead", schedule, 2, MICROBATCHES, STEPS)
            theirs += peer.numbers(1, schedule, MICROBATCHES, STEPS)
        ratio = ratio_of(theirs, ours)
        rows.append((schedule, with_noise(ours), with_noise(theirs), f"{ratio:.1f}x"))
        reached[f"{schedule} at least {goal} times as fast as the peer"] = ratio >= goal
    print_table(rows)
    return reached


def compare_bare(bench, runs):
    bare, one = [], []
    for _ in range(runs):
        bare += bench.numbers(1, "bare", MICROBATCHES, 256, 32, STEPS)
        one += bench.numbers(1, "one", MICROBATCHES, 256, 32, STEPS)
    added = ratio_of(one, bare) - 1
    print_table(
        [
            ("one rank, 64 microbatches of 32 x 256, linear 256", "time", "more"),
            ("a bare loop", with_noise(bare), ""),
            ("the executor", with_noise(one), f"{100 * added:.1f} %"),
        ]
    )
    return {"the executor adds less than 10 % to a bare loop": added < 0.1}


def main():
    arguments = argparse.ArgumentParser(description="Times our executor beside the peer's.")
    arguments.add_argument("--bench", required=True, help="the penstock_runtime_bench program")
    arguments.add_argument("--runs", type=int, default=5, help=f"of each case, {STEPS} steps each (default: %(default)s)")
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs is at least 1")

    peer = pathlib.Path(__file__).with_name("peer_runtime.py")
    print(f"A step, median of {options.runs} runs (fastest–slowest)\n")
    with Answering(options.bench) as bench, Answering(sys.executable, str(peer)) as answering_peer:
        goals = compare_overhead(bench, answering_peer, options.runs)
        print()
        goals |= compare_bare(bench, options.runs)
    return report_goals(goals)


if __name__ == "__main__":
    sys.exit(main())
