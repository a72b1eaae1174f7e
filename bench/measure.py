"""Common parts of the benchmarks: measuring processes, tables and goals.

Penstock and PyTorch alternate within one run, so that other load on the machine affects both. Times are medians, with the
fastest and the slowest run in parentheses as a measure of the noise.
"""

import contextlib
import statistics
import subprocess


class Answering:
    """A process that measures what each line of its input asks for, and prints a line of numbers."""

    def __init__(self, *command):
        self.command = command
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        # The pipe is broken if the process has died.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()

    def numbers(self, count, *words):
        question = " ".join(map(str, words))
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(question, file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        try:
            numbers = [float(word) for word in answer.split()]
        except ValueError:
            numbers = []
        if len(numbers) != count:
            raise SystemExit(f"{' '.join(self.command)}: '{question}' expected {count} numbers, found '{answer.strip()}'.")
        return numbers


def short(seconds):
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def with_noise(times):
    return f"{short(statistics.median(times))} ({short(min(times))}–{short(max(times))})"


def print_table(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        print("  ".join(cells))


def ratio_of(theirs, ours):
    return statistics.median(theirs) / statistics.median(ours)


def report_goals(goals):
    """Prints which goals are missed, and returns the exit code. `goals` maps each goal to True if it is reached."""
    missed = [goal for goal, reached in goals.items() if not reached]
    print("\ngoals: " + ("all reached" if not missed else "missed: " + "; ".join(missed)))
    return 1 if missed else 0
