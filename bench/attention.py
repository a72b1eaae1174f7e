"""Our attention beside the peer's, on one thread: 1 x 8 heads x 2,048 x 64 in float32, causal within a window of 256.

    attention.py --bench penstock_attention_bench [--runs N]

Run it with a Python that has the peer. A run asks each of them once, in turn, so that what else the machine does meets
all alike; the tables have medians, and the fastest and slowest. Then the memory that a forward and a backward hold at
most besides their inputs, each in a process of its own, by length.
"""

import argparse
import contextlib
import pathlib
import statistics
import subprocess
import sys
import time
import warnings

warnings.filterwarnings("ignore")

HEADS, SIZE, WINDOW = 8, 64, 256
LENGTH = 2048
LENGTHS = (1024, 2048, 4096, 8192)


class Answering:
    """A process that answers each line with a number."""

    def __init__(self, *command):
        self.command = command
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        # One that has died already breaks the pipe.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def number(self, *words):
        question = " ".join(map(str, words))
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(question, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        try:
            return float(answer)
        except ValueError:
            command = " ".join(self.command)
            raise SystemExit(f"{command}: '{question}' should give a number, and gave '{answer.strip()}'.") from None


class Peer:
    """What torch has for it, at one length."""

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
        # What is made on first use, such as compiled code, is made now.
        self.mask = self.make_mask()
        for act in (self.eager, self.compiled, self.sdpa, self.sdpa_both):
            act()


def seconds(act):
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def with_noise(times):
    return f"{statistics.median(times) * 1e3:.1f} ms ({min(times) * 1e3:.1f}–{max(times) * 1e3:.1f})"


def print_table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]))


def compare_times(path, runs):
    peer = Peer(LENGTH)
    peer.warm_up()
    # name, how to measure it, what of ours it stands beside
    measured = {
        "our forward": (lambda: bench.number("forward", LENGTH), None),
        "flex_attention, eager": (lambda: seconds(peer.eager), "our forward"),
        "flex_attention, compiled": (lambda: seconds(peer.compiled), "our forward"),
        "SDPA, dense mask": (lambda: seconds(peer.sdpa), "our forward"),
        "our forward + backward": (lambda: bench.number("both", LENGTH), None),
        "SDPA, dense mask, forward + backward": (lambda: seconds(peer.sdpa_both), "our forward + backward"),
        "our block mask": (lambda: bench.number("mask", LENGTH), None),
        "the peer's block mask": (lambda: seconds(peer.make_mask), "our block mask"),
    }
    times = {name: [] for name in measured}
    with Answering(path) as bench:
        for _ in range(runs):
            for name, (measure, _) in measured.items():
                times[name].append(measure())
    rows = [("", "time", "to ours")]
    for name, (_, ours) in measured.items():
        ratio = f"{statistics.median(times[name]) / statistics.median(times[ours]):.1f}x" if ours else ""
        rows.append((name, with_noise(times[name]), ratio))
    print_table(rows)


def peak_memory(length):
    """The peer's, for SDPA with the dense mask; run in a process of its own."""
    status = pathlib.Path("/proc/self/status")

    def line(name):
        return next(int(row.split()[1]) for row in status.read_text().splitlines() if row.startswith(name)) * 1024

    peer = Peer(length)
    peer.sdpa()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = line("VmRSS")
    peer.sdpa_both()
    return line("VmHWM") - before


def compare_memory(path):
    rows = [("length", "ours", "a token", "SDPA, dense mask", "a token")]
    for length in LENGTHS:
        with Answering(path) as bench:
            ours = bench.number("memory", length)
        command = [sys.executable, __file__, "--bench", path, "--peak-memory", str(length)]
        theirs = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row = [f"{length:,}"]
        for peak in (ours, theirs):
            row += [f"{peak / 2**20:.1f} MiB", f"{peak / length / 2**10:.1f} KiB"]
        rows.append(row)
    print_table(rows)


def main():
    arguments = argparse.ArgumentParser(description="Times our attention beside the peer's.")
    arguments.add_argument("--bench", required=True, help="the penstock_attention_bench program")
    arguments.add_argument("--runs", type=int, default=11, help="of each (default: %(default)s)")
    arguments.add_argument("--peak-memory", type=int, metavar="LENGTH", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.runs < 1:
        arguments.error("--runs is at least 1")
    if options.peak_memory:
        print(peak_memory(options.peak_memory))
        return 0

    shape = f"1 x {HEADS} heads x {LENGTH:,} x {SIZE}, window {WINDOW}, one thread"
    print(f"{shape}: median of {options.runs} runs (fastest–slowest)\n")
    compare_times(options.bench, options.runs)
    print("\nmemory that forward + backward hold at most, besides their inputs")
    compare_memory(options.bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
