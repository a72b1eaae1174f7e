"""Benchmarks attention, compared with PyTorch, on one thread: 1 x 8 heads x 2,048 x 64 in float32, causal within a window of 256.

    attention.py --bench penstock_attention_bench [--runs N]

Runs in a Python with torch. Then the memory that a forward and a backward hold at most besides their inputs, each in
a process of its own, by length.
"""

import argparse
import pathlib
import subprocess
import sys
import time
import warnings

from measure import Answering, print_table, ratio_of, report_goals, with_noise

warnings.filterwarnings("ignore")

HEADS, SIZE, WINDOW = 8, 64, 256
LENGTH = 2048
LENGTHS = (1024, 2048, 4096, 8192)


class PyTorch:
    """PyTorch's implementations, at one sequence length."""

    def __init__(self, length):
        import torch
        from torch.nn.attention import flex_attention as flex

        torch.set_num_threads(1)
        self.torch, self.flex = torch, flex
        self.length = length
        self.tensors = [torch.randn(1, HEADS, length, SIZE) for _ in range(3)]
        self.seed = torch.randn(1, HEADS, length, SIZE)
        rows = torch.arange(length)
        distance = rows[:, None] - rows
        self.dense = (distance >= 0) & (distance < WINDOW)
        self.compiled_flex = torch.compile(flex.flex_attention)

    @staticmethod
    def in_window(b, h, q, kv):
        return (q >= kv) & (q - kv < WINDOW)

    def make_mask(self):
        return self.flex.create_block_mask(self.in_window, None, None, self.length, self.length, device="cpu")

    def eager(self):
        self.flex.flex_attention(*self.tensors, block_mask=self.mask)

    def compiled(self):
        self.compiled_flex(*self.tensors, block_mask=self.mask)

    def sdpa(self):
        self.torch.nn.functional.scaled_dot_product_attention(*self.tensors, attn_mask=self.dense)

    def sdpa_both(self):
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors]
        self.torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=self.dense).backward(self.seed)

    def warm_up(self):
        # Warm up: compilation and other work of the first call.
        self.mask = self.make_mask()
        for act in (self.eager, self.compiled, self.sdpa, self.sdpa_both):
            act()


def seconds(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def compare_times(path, runs):
    pytorch = PyTorch(LENGTH)
    pytorch.warm_up()
    # Name, function that measures it, and the result of Penstock to compare it with.
    measured = {
        "our forward": (lambda: bench.numbers(1, "forward", LENGTH)[0], None),
        "flex_attention, eager": (lambda: seconds(pytorch.eager), "our forward"),
        "flex_attention, compiled": (lambda: seconds(pytorch.compiled), "our forward"),
        "SDPA, dense mask": (lambda: seconds(pytorch.sdpa), "our forward"),
        "our forward + backward": (lambda: bench.numbers(1, "both", LENGTH)[0], None),
        "SDPA, dense mask, forward + backward": (lambda: seconds(pytorch.sdpa_both), "our forward + backward"),
        "our block mask": (lambda: bench.numbers(1, "mask", LENGTH)[0], None),
        "PyTorch's block mask": (lambda: seconds(pytorch.make_mask), "our block mask"),
    }
    times = {name: [] for name in measured}
    with Answering(path) as bench:
        for _ in range(runs):
            for name, (measure, _) in measured.items():
                times[name].append(measure())
    rows, ratios = [("", "time", "to ours")], {}
    for name, (_, ours) in measured.items():
        ratios[name] = ratio_of(times[name], times[ours]) if ours else 1
        rows.append((name, with_noise(times[name]), f"{ratios[name]:.1f}x" if ours else ""))
    print_table(rows)
    return ratios


def peak_memory(length):
    """Returns the peak memory of PyTorch's SDPA with a dense mask. Runs in a process of its own."""
    status = pathlib.Path("/proc/self/status")

    def line(name):
        return next(int(row.split()[1]) for row in status.read_text().splitlines() if row.startswith(name)) * 1024

    pytorch = PyTorch(length)
    pytorch.sdpa()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = line("VmRSS")
    pytorch.sdpa_both()
    return line("VmHWM") - before


def compare_memory(path):
    rows, a_token = [("length", "ours", "a token", "SDPA, dense mask", "a token")], []
    for length in LENGTHS:
        with Answering(path) as bench:
            [ours] = bench.numbers(1, "memory", length)
        command = [sys.executable, __file__, "--bench", path, "--peak-memory", str(length)]
        theirs = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        a_token.append(ours / length)
        row = [f"{length:,}"]
        for peak in (ours, theirs):
            row += [f"{peak / 2**20:.1f} MiB", f"{peak / length / 2**10:.1f} KiB"]
        rows.append(row)
    print_table(rows)
    return a_token


def main():
    arguments = argparse.ArgumentParser(description="Times our attention compared with PyTorch's.")
    arguments.add_argument("--bench", required=True, help="the penstock_attention_bench program")
    arguments.add_argument("--runs", type=int, default=11, help="number of runs of each case (default: %(default)s)")
    arguments.add_argument("--peak-memory", type=int, metavar="LENGTH", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs is at least 1")
    if options.peak_memory:
        print(peak_memory(options.peak_memory))
        return 0

    shape = f"1 x {HEADS} heads x {LENGTH:,} x {SIZE}, window {WINDOW}, one thread"
    print(f"{shape}: median of {options.runs} runs (fastest–slowest)\n")
    ratios = compare_times(options.bench, options.runs)
    print("\npeak memory of forward + backward, without their inputs")
    a_token = compare_memory(options.bench)
    return report_goals(
        {
            "forward at least 20 times as fast as eager flex_attention": ratios["flex_attention, eager"] >= 20,
            "forward no slower than compiled flex_attention": ratios["flex_attention, compiled"] >= 1,
            "forward + backward at least 2.5 times as fast as SDPA": ratios["SDPA, dense mask, forward + backward"] >= 2.5,
            # Memory is allocated in pages, so up to a fifth more per token still counts as linear.
            "memory linear in the length": a_token[-1] <= 1.2 * a_token[0],
        }
    )


if __name__ == "__main__":
    sys.exit(main())
