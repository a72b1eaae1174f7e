"""Base class of the tests of penstock train. PENSTOCK names the command, PENSTOCK_PROGRAMS the directory that models.py has
written, and REFERENCE_PYTHON a Python with torch. With PENSTOCK_KILLS=N, N runs are killed; with PENSTOCK_GRID=whole, every
schedule runs on process ranks too."""

import json
import os
import pathlib
import re
import subprocess
import time

from command_case import PENSTOCK, CommandCase

PROGRAMS = os.environ["PENSTOCK_PROGRAMS"]
REFERENCE_PYTHON = os.environ["REFERENCE_PYTHON"]
WHOLE_GRID = os.environ.get("PENSTOCK_GRID") == "whole"
KILLS = int(os.environ.get("PENSTOCK_KILLS", "3"))

# Small enough for a test, with dropout and clipping on.
SMALL = ["--digits", 1, "--rows", 8, "--layers", 6, "--width", 16, "--heads", 2, "--dropout", 0.1, "--clip", 0.5]


def children_of(process):
    found = []
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The process name, in parentheses, may contain any character.
            if int(status.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def is_running(process):
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Case(CommandCase):
    def train(self, *words, output="run", **options):
        """Starts a new run, unless it resumes one."""
        overwrite = [] if "--resume" in words else ["--overwrite"]
        return self.penstock("train", "--output", output, *overwrite, *words, **options).stdout

    def python(self, script, *words):
        """Runs a script with torch and the tests' own save_tensors."""
        begin = "import sys, torch\nsys.path.append(sys.argv[1])\nfrom exporting import save_tensors\ntorch.manual_seed(0)\n"
        tests = pathlib.Path(__file__).parent.parent / "program"
        subprocess.run([REFERENCE_PYTHON, "-W", "ignore", "-c", begin + script, tests, *words], cwd=self.folder, check=True,
                       timeout=120)

    def batches(self, **files):
        """Writes batches of the given names, each a Python expression for its tensors."""
        (self.folder / "data").mkdir(exist_ok=True)
        self.python("".join(f"save_tensors({tensors}, 'data/{name}.safetensors')\n" for name, tensors in files.items()))

    def write_batches(self):
        """Writes batches for pair.pt2, in microbatches of 3 rows: three for training, and one for evaluation."""
        (self.folder / "data").mkdir()
        self.python("""
for i in range(3):
    x = torch.randn(12, 4)
    save_tensors({"args.0": x, "target": x @ torch.ones(4, 2)}, f"data/batch-{i}.safetensors")
save_tensors({"args.0": x, "target": x @ torch.ones(4, 2)}, "data/eval-0.safetensors")
""")

    def losses(self, output="run"):
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}

    def timelines(self, output="run"):
        """Returns the timelines of the page by name: of each, the data of its ranks."""
        page = (self.folder / output / "timeline.html").read_text()
        data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
        return {timeline["name"]: timeline["ranks"] for timeline in data["timelines"]}

    def peaks(self, output="run"):
        """Returns the peak memory of each rank."""
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        return [line["memory"] for line in map(json.loads, lines) if "memory" in line][-1]

    def begun(self, words, after, start=("train",), stderr=subprocess.DEVNULL):
        """Starts a run, and returns its process when it has done some steps."""
        process = subprocess.Popen([PENSTOCK, *map(str, start), "--output", "run", *map(str, words)], cwd=self.folder,
                                   stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.wait_for_steps(after)
        return process

    def wait_for_steps(self, count):
        metrics = self.folder / "run/metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not metrics.exists() or len(metrics.read_text().splitlines()) < count):
            time.sleep(0.001)

    def assert_ended(self, processes):
        deadline = time.monotonic() + 20
        while any(map(is_running, processes)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(any(map(is_running, processes)))

    def names_in(self, directory):
        return sorted(path.name for path in (self.folder / directory).iterdir())

    def assert_refused(self, *words, message):
        result = self.penstock(*words, code=2)
        self.assertIn(message, result.stderr)
        self.assertEqual(result.stderr.count("penstock: "), 1)
