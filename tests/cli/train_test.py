"""penstock train, generate and launch, as a user calls them. PENSTOCK names the command, PENSTOCK_PROGRAMS what models.py
has written, and PEER_PYTHON a Python with torch; with PENSTOCK_KILLS=N, N runs are killed, and with
PENSTOCK_GRID=whole every schedule runs on processes too."""

import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

PENSTOCK = os.environ["PENSTOCK"]
PROGRAMS = os.environ["PENSTOCK_PROGRAMS"]
PEER_PYTHON = os.environ["PEER_PYTHON"]
WHOLE_GRID = os.environ.get("PENSTOCK_GRID") == "whole"
KILLS = int(os.environ.get("PENSTOCK_KILLS", "3"))

# Small enough for a test, with dropout and clipping on.
SMALL = ["--digits", 1, "--rows", 8, "--layers", 6, "--width", 16, "--heads", 2, "--dropout", 0.1, "--clip", 0.5]


def children_of(process):
    found = []
    for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may have anything in it.
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


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def penstock(self, *words, code=0, environment=None):
        result = subprocess.run([PENSTOCK, *map(str, words)], cwd=self.folder, capture_output=True, text=True, timeout=300,
                                env={**os.environ, **(environment or {})})
        self.assertEqual(result.returncode, code, (words, result.stdout, result.stderr))
        return result

    def train(self, *words, output="run", **options):
        """Trains anew, unless it resumes."""
        anew = [] if "--resume" in words else ["--overwrite"]
        return self.penstock("train", "--output", output, *anew, *words, **options).stdout

    def python(self, script, *words):
        """Runs a script with torch and the tests' own save_tensors."""
        begin = "import sys, torch\nsys.path.append(sys.argv[1])\nfrom exporting import save_tensors\ntorch.manual_seed(0)\n"
        tests = pathlib.Path(__file__).parent.parent / "program"
        subprocess.run([PEER_PYTHON, "-W", "ignore", "-c", begin + script, tests, *words], cwd=self.folder, check=True,
                       timeout=120)

    def write_batches(self):
        """Batches for pair.pt2, in microbatches of 3 rows: three to train on, and one that is held out."""
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

    def begun(self, words, after, start=("train",)):
        """A training that has done some steps."""
        process = subprocess.Popen([PENSTOCK, *map(str, start), "--output", "run", *map(str, words)], cwd=self.folder,
                                   stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        metrics = self.folder / "run/metrics.jsonl"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not metrics.exists() or len(metrics.read_text().splitlines()) < after):
            time.sleep(0.001)
        return process

    def assert_ended(self, processes):
        deadline = time.monotonic() + 20
        while any(map(is_running, processes)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(any(map(is_running, processes)))

    def names_in(self, directory):
        return sorted(one.name for one in (self.folder / directory).iterdir())

    def assert_refused(self, *words, message):
        result = self.penstock(*words, code=2)
        self.assertIn(message, result.stderr)
        self.assertEqual(result.stderr.count("penstock: "), 1)


class Training(Case):
    def test_learns_sums_and_shows_some(self):
        text = self.train("--digits", 1, "--rows", 64, "--layers", 2, "--width", 32, "--steps", 250, "--eval-every", 125)
        self.assertRegex(text, r"2 stages on 2 ranks \(threads\), 1F1B, 8 microbatches\n")
        self.assertRegex(text, r"step 250/250   loss 0\.\d+")
        self.assertRegex(text, r"step 125: held out, loss [\d.]+, accuracy [\d.]+ %\n")
        self.assertRegex(text, r"memory +rank 0: [\d.]+ [kM]B measured, [\d.]+ [kM]B predicted\n +rank 1: ")
        self.assertRegex(text, r"Sums that it has never seen: [\d.]+ % of 512 right\.\n( +\d\+\d=\d\d( +wrong)?\n){6}")
        losses = self.losses()
        self.assertEqual(list(losses), list(range(1, 251)))
        self.assertLess(losses[250], losses[1] / 2)
        page = (self.folder / "run/timeline.html").read_text()
        self.assertIn('"name":"measured"', page)
        self.assertIn('"name":"simulated"', page)
        self.assertIn('"curve":{"first":1,"name":"Loss"', page)

    def test_names_places_in_the_file_of_a_schedule(self):
        (self.folder / "stuck.csv").write_text("# Stuck.\n0F0,0B0,0F1,0B1\n\n1F1,1F0,1B0,1B1\n")
        self.assert_refused("train", *SMALL, "--steps", 1, "--csv", "stuck.csv",
                            message="rank 0, stuck.csv:2:5: 0B0 waits for 1B0 on rank 1\n  rank 1, stuck.csv:4:1: 1F1 waits for 0F1 on rank 0")

    def test_reads_text_and_writes_a_sample(self):
        (self.folder / "text").write_text("the water turns the wheel and the wheel turns the mill. " * 40)
        text = self.train("--data", "text", "--length", 16, "--rows", 16, "--layers", 2, "--width", 32, "--steps", 30,
                          "--checkpoint", "kept")
        self.assertRegex(text, r"text, 2240 bytes\n")
        self.assertIn("A sample:\n", text)
        self.assertIn("step 30: checkpoint in kept/step-00000030\n", text)
        # The sample is of what was trained.
        generated = self.penstock("generate", "kept", "--bytes", 200, "--seed", 0).stdout
        self.assertEqual(text.partition("A sample:\n")[2], generated)
        sample = self.penstock("generate", "kept", "the water", "--bytes", 20, "--temperature", 0).stdout
        self.assertGreaterEqual(len(sample), len("the water") + 20 + 1)
        self.assertTrue(sample.startswith("the water"))
        again = self.penstock("generate", "kept/step-00000030", "the water", "--bytes", 20, "--temperature", 0, "--ranks", 1)
        self.assertEqual(again.stdout, sample)

    def test_writes_the_same_sample_on_any_ranks(self):
        (self.folder / "text").write_text("the water turns the wheel and the wheel turns the mill. " * 40)
        common = ["--data", "text", "--length", 16, "--rows", 16, "--layers", 2, "--width", 32, "--steps", 3]

        def sample(*words):
            return self.train(*common, *words).partition("A sample:\n")[2]

        whole = sample("--ranks", 1, "--microbatches", 8)
        self.assertGreater(len(whole), 200)
        for words in (["--ranks", 2], ["--ranks", 2, "--transport", "gloo"]):
            self.assertEqual(sample("--microbatches", 8, *words), whole)
        for words in ([], ["--shard"], ["--shard", "--transport", "gloo"]):
            self.assertGreater(len(sample("--microbatches", 4, "--data-parallel", 2, *words)), 200)

    def test_trains_an_exported_model_on_batches_of_files(self):
        self.write_batches()
        model = os.path.join(PROGRAMS, "pair.pt2")
        words = [model, "--data", "data", "--loss", "mse", "--steps", 60, "--learning-rate", 0.05]
        text = self.train(*words, "--microbatches", 4, "--checkpoint", "kept")
        self.assertIn("data, 3 batches\n", text)
        self.assertRegex(text, r"step 60: held out, loss [\d.]+\n")
        losses = self.losses()
        self.assertLess(losses[60], losses[1] / 2)
        # Another schedule, and replicas.
        for more in (["--schedule", "GPipe", "--ranks", 1, "--microbatches", 4],
                     ["--data-parallel", 2, "--microbatches", 2]):
            self.train(*words, *more, output="other")
            for step, loss in self.losses("other").items():
                self.assertAlmostEqual(loss, losses[step], delta=1e-2 * losses[step])
        self.assert_refused("generate", "kept", "x", message="is of an exported model, which writes no text by itself.")

    def batches(self, **files):
        """Batches of the given names, each a Python expression for its tensors."""
        script = "import sys, torch\nsys.path.append(sys.argv[1])\nfrom exporting import save_tensors\ntorch.manual_seed(0)\n"
        for name, tensors in files.items():
            script += f"save_tensors({tensors}, sys.argv[2] + '/{name}.safetensors')\n"
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        tests = pathlib.Path(__file__).parent.parent / "program"
        subprocess.run([PEER_PYTHON, "-W", "ignore", "-c", script, tests, data], check=True, timeout=120)

    def test_evaluates_a_model_that_gives_its_loss(self):
        script = """
import sys, torch
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.second(torch.relu(self.first(x))), y)
torch.export.save(torch.export.export(Loss().train(), (torch.ones(3, 4), torch.ones(3, 2))), sys.argv[1])
"""
        subprocess.run([PEER_PYTHON, "-W", "ignore", "-c", script, self.folder / "loss.pt2"], check=True, timeout=120)
        batch = '{"args.0": torch.randn(12, 4), "args.1": torch.randn(12, 2)}'
        self.batches(batch0=batch, eval0=batch)
        text = self.train("loss.pt2", "--data", "data", "--loss", "output", "--steps", 2, "--microbatches", 4)
        self.assertRegex(text, r"step 2: held out, loss [\d.]+\n")

    def test_tries_an_evaluation_before_the_first_step(self):
        x = '"args.0": torch.randn(12, 4)'
        self.batches(batch0="{" + x + ', "target": torch.zeros(12, dtype=torch.int64)}',
                     eval0="{" + x + ', "target": torch.full((12,), 5)}')
        result = self.penstock("train", f"{PROGRAMS}/pair.pt2", "--data", "data", "--loss", "cross_entropy", "--steps", 2,
                               "--microbatches", 4, "--output", "run", code=2)
        self.assertIn("data/eval0.safetensors, rows 0 to 2: rank 1, stage 1, 1F0 (microbatch 0): Target 5 is out of bounds.",
                      result.stderr)
        self.assertEqual(self.losses(), {})

    def test_names_the_file_and_the_rows_of_bad_data(self):
        def refused(message, loss, **files):
            for name in ("data", "penstock-train"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self.batches(**files)
            result = self.penstock("train", f"{PROGRAMS}/pair.pt2", "--data", "data", "--loss", loss, "--steps", 1,
                                   "--microbatches", 4, code=2)
            self.assertIn(message, result.stderr)

        x = '"args.0": torch.randn(12, 4)'
        refused("penstock: data/a.safetensors, rows 0 to 2: rank 1, stage 1, 1F0 (microbatch 0): --loss mse compares each number "
                "of the output with one of the target, and their shapes differ: the output is a float32 tensor of shape [3, 2] "
                "and the target a float32 tensor of shape [3, 1].", "mse", a="{" + x + ', "target": torch.randn(12, 1)}')
        refused("shape [3, 2] and the target a float32 tensor of shape [3].", "mse", a="{" + x + ', "target": torch.randn(12)}')
        refused("penstock: data/a.safetensors, rows 6 to 8: rank 1, stage 1, 1F2 (microbatch 2): Target 5 is out of bounds.",
                "cross_entropy", a="{" + x + ', "target": torch.tensor([0] * 7 + [5] + [0] * 4)}')
        refused("penstock: data/a.safetensors, rows 0 to 2: rank 1, stage 1, 1F0 (microbatch 0): --loss cross_entropy takes class "
                "indices of int64, or probabilities in the shape of the output: the target is a float32 tensor of shape [3] and "
                "the output a float32 tensor of shape [3, 2].", "cross_entropy", a="{" + x + ', "target": torch.zeros(12)}')
        refused("penstock: data/a.safetensors: the arguments can be split into 3 only, and there are 4 microbatches.",
                "mse", a='{"args.0": torch.randn(3, 4), "target": torch.randn(3, 2)}')
        refused("penstock: data/a.safetensors: the target (float32 tensor of shape [10, 2]) has 10 rows, and args[0] ",
                "mse", a="{" + x + ', "target": torch.randn(10, 2)}')
        refused("penstock: data/a.safetensors, rows 0 to 1: args.0, dimension 0: found 2, expected 3, which is fixed.",
                "mse", a='{"args.0": torch.randn(8, 4), "target": torch.randn(8, 2)}')
        refused("penstock: step 1, data/a.safetensors: there is no target that counts: all of them are ignored.",
                "cross_entropy", a="{" + x + ', "target": torch.full((12,), -100)}')

    def test_stops_or_skips_where_the_loss_is_not_finite(self):
        good = '{"args.0": torch.randn(12, 4), "target": torch.randn(12, 2)}'
        self.batches(a=good, b='{"args.0": torch.tensor([1.0] * 16 + [float("nan")] + [1.0] * 31).view(12, 4), "target": torch.ones(12, 2)}')
        words = [f"{PROGRAMS}/pair.pt2", "--data", "data", "--loss", "mse", "--steps", 6, "--microbatches", 4]
        for transport in ("threads", "gloo"):
            with self.subTest(transport=transport):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                shutil.rmtree(self.folder / "kept", ignore_errors=True)
                result = self.penstock("train", *words, "--transport", transport, "--output", "run", code=2)
                self.assertRegex(result.stderr, r"step \d, data/b\.safetensors, microbatch 1 \(rows 3 to 5\), stage 1: the loss is "
                                                r"NaN\.\n  The first parameter whose gradient is not finite is first\.weight of stage 0\.")
                shutil.rmtree(self.folder / "run")
                text = self.train(*words, "--transport", transport, "--on-nonfinite", "skip", "--checkpoint", "kept")
                self.assertRegex(text, r"skipped step \d, data/b\.safetensors, microbatch 1 ")
                self.assertIn("skipped      3 of 6 steps, whose loss or gradients were not finite\n", text)
                lines = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
                self.assertEqual([line["loss"] is None for line in lines].count(True), 3)
                for line in lines:
                    self.assertEqual("skipped" in line, line["loss"] is None)
                    self.assertEqual(line["gradient_norm"] is None, line["loss"] is None)
                shutil.rmtree(self.folder / "run")
                shutil.rmtree(self.folder / "kept")
                self.batches(a='{"args.0": torch.full((12, 4), float("inf")), "target": torch.ones(12, 2)}')
                result = self.penstock("train", *words, "--transport", transport, "--on-nonfinite", "skip", "--max-skipped", 2,
                                       "--output", "run", code=2)
                self.assertIn("The 2 steps before it were skipped for the like.", result.stderr)
                self.batches(a=good)

    def test_ignored_targets_do_not_count(self):
        ids = '"args.0": torch.randn(12, 4)'
        target = "torch.tensor([0, 1, 0, 7, 7, 7, 7, 0, 1, 1, 7, 0])"
        self.batches(a="{" + ids + f', "target": {target}' + "}")
        self.train(f"{PROGRAMS}/pair.pt2", "--data", "data", "--loss", "cross_entropy", "--ignore-index", 7, "--steps", 2,
                   "--microbatches", 4)
        script = """
import sys, torch
model = torch.export.load(sys.argv[1]).module()
from safetensors import safe_open
with safe_open(sys.argv[2], "pt") as file:
    x, y = file.get_tensor("args.0"), file.get_tensor("target")
output = torch.cat([model(part) for part in x.split(3)])
print(torch.nn.functional.cross_entropy(output, y, ignore_index=7).item())
"""
        found = subprocess.run([PEER_PYTHON, "-W", "ignore", "-c", script, f"{PROGRAMS}/pair.pt2", self.folder / "data/a.safetensors"],
                               capture_output=True, text=True, timeout=120)
        self.assertAlmostEqual(self.losses()[1], float(found.stdout), delta=1e-6, msg=found.stderr)

    def test_is_told_in_a_file_too(self):
        (self.folder / "run.toml").write_text("digits = 1\nrows = 8\nlayers = 2\nwidth = 16\nheads = 2\nsteps = 3\n")
        (self.folder / "run.json").write_text(json.dumps({"digits": 1, "rows": 8, "layers": 2, "width": 16, "heads": 2,
                                                          "steps": 3, "shard": False}))
        self.train("--config", "run.toml", output="toml")
        self.train("--config", "run.json", output="json")
        self.assertEqual(self.losses("toml"), self.losses("json"))
        # The line comes first, and what a run was told is a configuration itself.
        self.train("--config", "run.toml", "--steps", 2, output="line")
        self.assertEqual(list(self.losses("line")), [1, 2])
        resolved = json.loads((self.folder / "toml/config.json").read_text())
        self.assertEqual((resolved["digits"], resolved["steps"], resolved["schedule"]), (1, 3, "1F1B"))
        self.train("--config", "toml/config.json", output="again")
        self.assertEqual(self.losses("again"), self.losses("toml"))
        (self.folder / "wrong.toml").write_text("layer = 2\n")
        self.assert_refused("train", "--config", "wrong.toml",
                            message="wrong.toml: there is no option 'layer'.\n  Hint: did you mean layers?")
        (self.folder / "wrong.json").write_text('{"rows": "many"}')
        self.assert_refused("train", "--config", "wrong.json", message="wrong.json: ")

    def test_says_what_is_wrong(self):
        self.assert_refused("train", "--data", "none", message="none: there is no such file or folder.")
        self.assert_refused("train", f"{PROGRAMS}/pair.pt2", "--layers", 2,
                            message="--layers is of the GPT that is trained without MODEL.pt2; given is ")
        self.assert_refused("train", "--stages", 9, message="a GPT of 4 layers cannot be cut into 9 stages")
        self.assert_refused("train", "--width", 10, "--heads", 4, message="the heads share it out evenly")
        self.assert_refused("train", os.path.join(PROGRAMS, "pair.pt2"), message="what is ")
        self.assert_refused("train", "--resume", message="--resume continues from the checkpoints of --checkpoint DIR, which is missing.\n  Hint: add --checkpoint DIR.")
        self.assert_refused("train", "--resume", "--overwrite", "--checkpoint", "kept",
                            message="--resume continues an earlier run, and --overwrite removes it; give one of them.")
        self.assert_refused("generate", "none", "x", message="none: there is no such checkpoint.")
        self.assert_refused("launch", message="what is to be launched?")


class Sameness(Case):
    def test_losses_are_those_of_one_rank(self):
        schedules = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
        common = [*SMALL, "--steps", 3, "--microbatches", 8]
        self.train(*common, "--ranks", 1, output="whole")
        whole = self.losses("whole")
        self.assertEqual(len(set(whole.values())), 3)
        for i, schedule in enumerate(schedules):
            for ranks in (1, 2, 4):
                # In processes a part, as each takes its second to start.
                is_part = WHOLE_GRID or ranks == (2, 4)[i % 2]
                transports = ["threads", "gloo"] if is_part else ["threads"]
                for transport in transports:
                    with self.subTest(schedule=schedule, ranks=ranks, transport=transport):
                        self.train(*common, "--schedule", schedule, "--ranks", ranks, "--transport", transport,
                                   output="other")
                        self.assertEqual(self.losses("other"), whole)

    def test_replicas_agree_but_for_rounding(self):
        common = ["--digits", 1, "--rows", 16, "--layers", 2, "--width", 16, "--heads", 2, "--steps", 4]
        self.train(*common, "--microbatches", 4, output="one")
        for words in ([], ["--shard"], ["--transport", "gloo"], ["--transport", "gloo", "--shard"]):
            with self.subTest(words=words):
                self.train(*common, "--data-parallel", 2, "--microbatches", 2, *words, output="two")
                for step, loss in self.losses("two").items():
                    self.assertAlmostEqual(loss, self.losses("one")[step], delta=1e-4)


class Checkpoints(Case):
    def test_a_run_goes_on_with_other_ranks(self):
        common = [*SMALL, "--steps", 8, "--microbatches", 8]
        self.train(*common, output="whole")
        words = [*common, "--checkpoint-every", 2, "--keep", 2]
        result = self.interrupted([*words, "--checkpoint", "kept"], after=3)
        self.assertIn("stopped after step", result)
        for more in (["--ranks", 4, "--schedule", "GPipe"], ["--transport", "gloo", "--schedule", "ZBVZeroBubble"]):
            shutil.copytree(self.folder / "kept", self.folder / "again")
            shutil.copytree(self.folder / "run", self.folder / "other")
            self.train(*words, "--resume", "--checkpoint", "again", *more, output="other")
            self.assertEqual(self.losses("other"), self.losses("whole"))
            shutil.rmtree(self.folder / "again")
            shutil.rmtree(self.folder / "other")

    def test_a_run_that_is_done_has_nothing_to_do(self):
        words = [*SMALL, "--checkpoint", "kept"]
        self.train(*words, "--steps", 3)
        before = {one: one.read_bytes() for one in self.folder.rglob("*") if one.is_file()}
        for steps in (3, 2):
            for transport in ("threads", "gloo"):
                text = self.train(*words, "--steps", steps, "--resume", "--transport", transport)
                self.assertEqual(text, f"nothing to do: step 3 of {steps} is done.\n  Hint: --steps N continues with more steps.\n")
        self.assertEqual({one: one.read_bytes() for one in self.folder.rglob("*") if one.is_file()}, before)

    def interrupted(self, words, after):
        """Sends Ctrl-C after some steps."""
        process = self.begun(words, after)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
        # It may have been done already.
        self.assertIn(process.returncode, (0, 130))
        return text + ("stopped after step" if process.returncode == 0 else "")

    def test_an_interrupted_run_leaves_a_checkpoint_and_its_timeline(self):
        words = [*SMALL, "--steps", 100000, "--microbatches", 8, "--checkpoint", "kept", "--overwrite"]
        for start in (["train"], ["train", "--transport", "gloo"], ["launch", "--processes", 2, "train"]):
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
                with self.subTest(start=start, signal=number):
                    shutil.rmtree(self.folder / "run", ignore_errors=True)
                    process = self.begun(words, after=2, start=start)
                    ranks = children_of(process.pid)
                    process.send_signal(number)
                    text, _ = process.communicate(timeout=60)
                    self.assertEqual(process.returncode, code, text)
                    self.assert_ended(ranks)
                    done = int(re.search(r"stopped after step (\d+); --resume continues from here\.\n", text)[1])
                    self.assertEqual(self.names_in("kept"), [f"step-{done:08}"])
                    self.assertRegex(text, "throughput +[^0]")
                    self.assertIn('"name":"measured"', (self.folder / "run/timeline.html").read_text())
                    self.assertEqual(list(self.losses())[-1], done)

    def test_processes_end_with_the_one_that_has_started_them(self):
        words = [*SMALL, "--steps", 100000, "--microbatches", 8, "--transport", "gloo", "--checkpoint", "kept"]
        process = self.begun(words, after=2)
        ranks = children_of(process.pid)
        self.assertEqual(len(ranks), 2)
        process.kill()
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, -9)
        self.assert_ended(ranks)
        self.assertEqual(list((self.folder / "kept").glob("step-*")), [])

    def test_a_run_that_is_killed_at_any_moment_goes_on_to_the_same_losses(self):
        common = [*SMALL, "--steps", 60, "--microbatches", 8]
        self.train(*common, output="whole")
        whole = self.losses("whole")
        seed = random.randrange(10**6)
        draw = random.Random(seed)
        words = [*common, "--checkpoint", "kept", "--checkpoint-every", 2, "--resume"]
        for kill in range(KILLS):
            with self.subTest(kill=kill, seed=seed):
                process = subprocess.Popen([PENSTOCK, "train", "--output", "run", *map(str, words)], cwd=self.folder,
                                           stdout=subprocess.DEVNULL)
                time.sleep(draw.uniform(0.2, 1.5))
                process.kill()
                process.wait(timeout=60)
                # What there is, is whole.
                kept = self.folder / "kept"
                for one in kept.glob("step-*") if kept.exists() else []:
                    self.assertTrue((one / "manifest.json").exists())
        self.train(*words)
        self.assertEqual(self.losses(), whole)
        self.assertEqual([one.name for one in (self.folder / "kept").iterdir() if one.name.startswith(".")], [])

    def test_one_that_is_damaged_or_of_another_model_is_refused(self):
        words = [*SMALL, "--steps", 2, "--checkpoint", "kept", "--checkpoint-every", 1]
        self.train(*words)
        self.assert_refused("train", *words, "--resume", "--length", 7, "--data", __file__,
                            message="is of another model.\n  It is of:  GPT, 6 layers of width 16 ")
        self.assert_refused("train", *words, "--resume", "--optimizer", "sgd",
                            message="has what adamw remembers, and the optimizer is sgd.\n  Hint: --optimizer adamw continues it.")
        damaged = self.folder / "kept/step-00000002/weights-0.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        self.assert_refused("train", *words, "--resume", message="weights-0.safetensors: is damaged: its bytes do not have")
        # The older one is good.
        (self.folder / "kept/step-00000002").rename(self.folder / "aside")
        self.train(*words, "--resume")

    def test_one_of_another_exported_model_is_refused_in_ten_lines(self):
        self.python("""
def export(layers, width, name):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    model = torch.nn.Sequential(torch.nn.Linear(4, width), model, torch.nn.Linear(width, 2)).train()
    torch.export.save(torch.export.export(model, (torch.randn(3, 4),)), name)
export(40, 8, "model.pt2")
export(41, 8, "longer.pt2")
export(40, 9, "wider.pt2")
""")
        self.write_batches()
        words = ["--data", "data", "--loss", "mse", "--microbatches", 4, "--checkpoint", "kept"]
        self.train("model.pt2", *words, "--steps", 1)
        it_is = "step-00000001: is of another model.\n  It is of:  an exported model with 84 parameters of 2938 elements\n"
        for name, differences in (
                ("longer", "  1.40.bias: only in this model\n  1.40.weight: only in this model\n"),
                ("wider", "  0.bias: [8] in the checkpoint, [9] in this model\n")):
            for transport in ("threads", "gloo"):
                result = self.penstock("train", f"{name}.pt2", *words, "--steps", 2, "--resume", "--transport", transport,
                                       code=2)
                self.assertIn(it_is, result.stderr)
                self.assertIn(differences, result.stderr)
                self.assertLessEqual(len(result.stderr.splitlines()), 10, result.stderr)
        self.train("model.pt2", *words, "--steps", 2, "--resume")

    def test_python_opens_them(self):
        self.train(*SMALL, "--steps", 1, "--checkpoint", "kept")
        script = "import json, safetensors; print(sorted(safetensors.safe_open('kept/step-00000001/weights-0.safetensors', 'pt').keys())[0])"
        found = subprocess.run([PEER_PYTHON, "-W", "ignore", "-c", script], cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.assertEqual(found.stdout, "blocks.0.before_attention.bias\n", found.stderr)


class Directories(Case):
    def test_what_an_earlier_run_has_left_is_refused_or_overwritten(self):
        words = ["--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2, "--checkpoint", "kept"]
        self.train(*words, "--steps", 6, "--checkpoint-every", 2)
        before = self.names_in("kept")
        metrics = (self.folder / "run/metrics.jsonl").read_bytes()
        hint = "\n  Hint: --resume continues that run, --overwrite begins anew, "
        for transport in ("threads", "gloo"):
            self.assert_refused("train", *words, "--steps", 3, "--output", "other", "--transport", transport,
                                message="kept: has checkpoints of an earlier run, the last of them step-00000006."
                                + hint + "--checkpoint DIR writes elsewhere.")
            self.assert_refused("train", "--steps", 3, "--output", "run", "--transport", transport,
                                message="run/metrics.jsonl: has the metrics of an earlier run."
                                + hint + "--output DIR writes elsewhere.")
        self.assertEqual(self.names_in("kept"), before)
        self.assertEqual((self.folder / "run/metrics.jsonl").read_bytes(), metrics)
        # A directory that was made for a run that did not begin is removed.
        self.assertFalse((self.folder / "other").exists())
        text = self.train(*words, "--steps", 3)
        self.assertIn("step 3: checkpoint in kept/step-00000003\n", text)
        self.assertEqual(self.names_in("kept"), ["step-00000003"])
        self.assertEqual(list(self.losses()), [1, 2, 3])
        self.assertIn("continues after step 3\n", self.train(*words, "--steps", 4, "--resume"))

    def test_one_checkpoint_is_not_a_directory_of_them(self):
        self.train(*SMALL, "--steps", 1, "--checkpoint", "kept")
        self.assert_refused("train", *SMALL, "--steps", 2, "--resume", "--checkpoint", "kept/step-00000001",
                            message="kept/step-00000001: is a checkpoint, expected the directory that checkpoints are "
                            "written to.\n  Hint: --checkpoint kept\n")

    def test_metrics_of_later_steps_are_removed_and_the_rest_stays(self):
        words = [*SMALL, "--steps", 4, "--checkpoint", "kept"]
        self.train(*SMALL, "--steps", 2, "--checkpoint", "kept")
        metrics = self.folder / "run/metrics.jsonl"
        kept = metrics.read_text()
        # A loss that is not a number, steps after the checkpoint, and what a killed process has left.
        kept = kept.replace('"loss":', '"loss":null,"was":', 1)
        metrics.write_text(kept + '{"step": 3, "loss": 1.0}\n{"step": 4, "lo')
        text = self.train(*words, "--resume")
        self.assertIn("run/metrics.jsonl: 2 lines after step 2 removed\n", text)
        self.assertTrue(metrics.read_text().startswith(kept))
        self.assertEqual(list(self.losses()), [1, 2, 3, 4])

    def test_two_runs_do_not_share_a_directory(self):
        words = [*SMALL, "--steps", 100000, "--microbatches", 8]
        for transport in ("threads", "gloo"):
            with self.subTest(transport=transport):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                first = self.begun([*words, "--overwrite", "--checkpoint", "kept", "--transport", transport], after=2)
                try:
                    # The coordinator holds the locks.
                    owners = [first.pid] if transport == "threads" else children_of(first.pid)
                    end = ".\n  Hint: wait until it ends, or choose another directory."
                    for more in (["--output", "run"], ["--output", "other", "--checkpoint", "kept"],
                                 ["--output", "run", "--checkpoint", "run"]):
                        result = self.penstock("train", *SMALL, "--steps", 3, *more, "--overwrite", code=2)
                        found = re.search(r"(\w+): another run writes to it: process (\d+)" + re.escape(end), result.stderr)
                        self.assertTrue(found, result.stderr)
                        self.assertIn(int(found[2]), owners)
                finally:
                    first.kill()
                    first.communicate(timeout=60)
                self.assert_ended(owners)
                # The lock went with the process.
                self.train(*SMALL, "--steps", 1, "--checkpoint", "kept")
                self.assertEqual(self.names_in("kept"), ["step-00000001"])
                self.assertFalse((self.folder / "other").exists())

    def test_output_and_checkpoints_may_be_one_directory(self):
        self.train(*SMALL, "--steps", 1, "--checkpoint", "run")
        self.assertEqual(self.names_in("run"), ["config.json", "metrics.jsonl", "step-00000001", "timeline.html"])


class Preflight(Case):
    """What is found before the first step."""

    def assert_nothing_ran(self, *words, message, output="run", **options):
        result = self.penstock("train", "--output", output, *words, code=2, **options)
        self.assertRegex(result.stderr, message)
        self.assertNotIn("loss", result.stdout)
        return result

    def test_directories_that_cannot_be_written_to(self):
        (self.folder / "file").write_text("")
        for option in ("--output", "--checkpoint"):
            for path, message in (("file", "file: is not a directory.\n  Hint: choose another path, or remove the file."),
                                  ("/proc/none", "/proc/none: could not be created: /proc/none: No such file")):
                self.assert_refused("train", *SMALL, option, path, message=message)

    def test_a_disk_that_is_too_small(self):
        # More checkpoints than any disk has room for.
        many = 10**9
        self.assert_nothing_ran(*SMALL, "--checkpoint", "kept", "--checkpoint-every", 1, "--steps", many, "--keep", many,
                                message=r"kept: has [\d.]+ MB free, and 1000000001 checkpoints take about [\d.]+ MB\.\n"
                                r"  Hint: free some space, choose a directory on another disk, or keep fewer checkpoints\.")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_every_batch_and_every_evaluation(self):
        self.write_batches()
        words = [os.path.join(PROGRAMS, "pair.pt2"), "--data", "data", "--loss", "mse", "--steps", 1, "--microbatches", 4]
        good = (self.folder / "data/batch-2.safetensors").read_bytes()
        for name in ("batch-2", "eval-0"):
            file = self.folder / f"data/{name}.safetensors"
            for tensors, message in (
                    ('"args.0": torch.ones(12, 5), "target": torch.ones(12, 2)', "dimension 1: found 5, expected 4"),
                    ('"args.0": torch.ones(12, 4).double(), "target": torch.ones(12, 2)', "found dtype float64, expected float32"),
                    ('"args.0": torch.ones(2, 4), "target": torch.ones(2, 2)', "can be split into 2 only, and there are 4 micro"),
                    ('"args.0": torch.ones(12, 4)', "has no 'target', which --loss mse compares"),
                    ('"x": torch.ones(12, 4), "target": torch.ones(12, 2)', "the input 'args.0' is missing; given are x")):
                with self.subTest(name=name, tensors=tensors):
                    self.python(f"save_tensors({{{tensors}}}, 'data/{name}.safetensors')")
                    self.assert_nothing_ran(*words, message=f"data/{name}.safetensors(, rows 0 to 2)?: .*" + message)
            file.write_bytes(good[:100])
            self.assert_nothing_ran(*words, message=f"data/{name}.safetensors: ")
            file.write_bytes(good)
        self.assertFalse((self.folder / "run").exists())

    def test_a_dry_run_shows_what_a_run_would_take_and_writes_nothing(self):
        for more in ([], ["--transport", "gloo"], ["--data-parallel", 2, "--shard"]):
            text = self.penstock("train", *SMALL, "--steps", 500, "--microbatches", 4, "--checkpoint", "kept", "--dry-run",
                                 *more).stdout
            self.assertRegex(text, r"2 stages on 2 ranks \((threads|processes)\), 1F1B, 4 microbatches")
            self.assertRegex(text, r"\ncut +stage 0 on rank 0: \d+ parameters, [\d.]+ k elements\n +stage 1 on rank 1: ")
            self.assertRegex(text, r"\nbubble +[\d.]+ % measured, [\d.]+ % simulated\n")
            self.assertRegex(text, r"\nmemory +rank 0: [\d.]+ [kM]B measured, [\d.]+ [kM]B predicted\n +rank 1: ")
            self.assertRegex(text, r"\ntime +[\d.e-]+ s a step, about \d+:\d\d for 500 steps\n")
            self.assertRegex(text, r"\ncheckpoint +[\d.]+ [kM]B, of which the last 3 stay\nNothing was written\.\n$")
            self.assertEqual(list(self.folder.iterdir()), [])

    # A process that may write files of some bytes alone, which is what a full disk is like.
    def test_a_disk_that_becomes_full_leaves_no_part_of_a_checkpoint(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))

        for transport in ("threads", "gloo"):
            result = subprocess.run([PENSTOCK, "train", *map(str, SMALL), "--steps", "2", "--checkpoint", "kept", "--output",
                                     "run-" + transport, "--transport", transport], cwd=self.folder, capture_output=True,
                                    text=True, timeout=300, preexec_fn=limit)
            self.assertEqual(result.returncode, 2, result)
            self.assertRegex(result.stderr, r"kept/\.unfinished-step-00000002/weights-\d\.safetensors: could not be written: "
                             "File too large")
            self.assertEqual(self.names_in("."), ["run-gloo", "run-threads"] if transport == "gloo" else ["run-threads"])


class Configuration(Case):
    def test_says_what_was_chosen_and_nothing_else(self):
        self.write_batches()
        self.train("--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2, "--steps", 1, output="gpt")
        self.train(os.path.join(PROGRAMS, "pair.pt2"), "--data", "data", "--loss", "mse", "--microbatches", 4, "--steps", 1,
                   "--optimizer", "sgd", "--no-shuffle", output="pair")
        gpt, pair = (json.loads((self.folder / one / "config.json").read_text()) for one in ("gpt", "pair"))
        self.assertEqual((gpt["ranks"], gpt["microbatches"], gpt["seed"]), (2, 8, 0))
        self.assertEqual((pair["ranks"], pair["microbatches"], pair["seed"]), (2, 4, 0))
        self.assertEqual({"loss", "at", "shuffle", "length", "momentum", "model", "data", "overwrite"} & set(gpt), set())
        self.assertEqual({"digits", "rows", "length", "layers", "width", "heads", "beta1", "beta2"} & set(pair), set())
        self.assertEqual((pair["shuffle"], pair["momentum"], pair["loss"]), (False, 0.9, "mse"))
        self.assertEqual((pair["data"], pair["output"]), (str(self.folder / "data"), str(self.folder / "pair")))
        # From another directory it is the same run.
        (self.folder / "elsewhere").mkdir()
        result = subprocess.run([PENSTOCK, "train", "--config", "../pair/config.json", "--output", "again"], timeout=300,
                                cwd=self.folder / "elsewhere", capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.losses("elsewhere/again"), self.losses("pair"))

    def test_paths_of_inputs_are_relative_to_the_file(self):
        self.write_batches()
        setup = self.folder / "setup"
        setup.mkdir()
        shutil.copy(os.path.join(PROGRAMS, "pair.pt2"), setup / "model.pt2")
        (self.folder / "data").rename(setup / "batches")
        (setup / "run.toml").write_text('model = "model.pt2"\ndata = "batches"\nloss = "mse"\nmicrobatches = 4\nsteps = 1\n')
        (setup / "run.json").write_text(json.dumps({"model": "model.pt2", "data": "batches", "loss": "mse", "steps": 1,
                                                    "microbatches": 4, "no-shuffle": True, "checkpoint": "kept"}))
        for name in ("run.toml", "run.json"):
            self.train("--config", f"setup/{name}")
        # What is written is relative to where the command runs.
        self.assertEqual(self.names_in("kept"), ["step-00000001"])
        self.assertFalse(json.loads((self.folder / "run/config.json").read_text())["shuffle"])

    def test_options_of_another_kind_of_model_are_refused(self):
        self.assert_refused("train", "--loss", "mse", message="--loss is for an exported model, and MODEL.pt2 is not given.")
        self.assert_refused("train", "--no-shuffle", message="--shuffle is for an exported model, and MODEL.pt2 is not given.")
        self.assert_refused("train", "--learning-rate", 0.1, "--min-lr", 0.2,
                            message="--min-lr is 0.2, more than --learning-rate, 0.1, which it is the end of.")

    def test_the_learning_rate_ends_at_its_minimum(self):
        rates = {}
        for minimum in (None, 0.001):
            self.train(*SMALL, "--steps", 50, "--warmup", 0, "--learning-rate", 0.01,
                       *([] if minimum is None else ["--min-lr", minimum]))
            lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
            rates[minimum] = [one["learning_rate"] for one in map(json.loads, lines) if "loss" in one]
        for minimum, end in ((None, 0.0005), (0.001, 0.001)):
            self.assertEqual(rates[minimum][0], 0.01)
            self.assertAlmostEqual(rates[minimum][-1], end, delta=0.0001)
            self.assertGreater(rates[minimum][-1], end)

    def test_batches_come_in_the_order_of_their_names_without_shuffling(self):
        self.write_batches()
        words = [os.path.join(PROGRAMS, "pair.pt2"), "--data", "data", "--loss", "mse", "--microbatches", 4,
                 "--learning-rate", 0, "--weight-decay", 0]

        def losses(*more):
            self.train(*words, *more)
            return list(self.losses().values())

        in_order = losses("--steps", 7, "--no-shuffle")
        self.assertEqual(in_order, (in_order[:3] * 3)[:7])
        shuffled = losses("--steps", 12)
        for first in range(0, 12, 3):
            self.assertEqual(sorted(shuffled[first:first + 3]), sorted(in_order[:3]))
        self.assertNotEqual(shuffled, in_order[:3] * 4)
        for number in (1, 0):
            (self.folder / f"data/batch-{number}.safetensors").rename(self.folder / f"data/batch-{number + 3}.safetensors")
        self.assertEqual(losses("--steps", 3, "--no-shuffle"), [in_order[2], in_order[0], in_order[1]])

    def test_progress_is_printed_as_often_as_told(self):
        for words, steps in (([], [1, 2, 3, 4, 5, 6, 7]), (["--log-every", 3], [1, 3, 6, 7])):
            text = self.train(*SMALL, "--steps", 7, *words)
            self.assertEqual([int(one) for one in re.findall(r"^step (\d)/7 ", text, re.MULTILINE)], steps)


class Processes(Case):
    def test_ranks_with_other_options_are_told_apart(self):
        def ranks(*options):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            started = []
            for rank, words in enumerate(options):
                environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(options)), "MASTER_ADDR": "127.0.0.1",
                               "MASTER_PORT": str(port)}
                started.append(subprocess.Popen([PENSTOCK, "train", *map(str, [*SMALL, "--steps", 2, *words])],
                                                cwd=self.folder, env=environment, stderr=subprocess.PIPE,
                                                stdout=subprocess.DEVNULL, text=True))
            return [(one.communicate(timeout=120)[1], one.returncode) for one in started]

        for text, code in ranks(["--learning-rate", 0.1], ["--learning-rate", 0.2, "--output", "elsewhere"]):
            self.assertEqual(code, 2, text)
            self.assertEqual(text, "penstock: the ranks have different options.\n  learning-rate: 0.2 on rank 1, 0.1 on rank 0\n"
                             "  Hint: start all ranks with the same command line and configuration file.\n")
        for text, code in ranks(["--checkpoint", "kept", "--seed", 3], []):
            self.assertEqual(code, 2, text)
            self.assertIn("\n  checkpoint: not given on rank 1, given on rank 0\n  seed: 0 on rank 1, 3 on rank 0\n", text)
        (self.folder / "a").write_text("the water turns the wheel. " * 40)
        (self.folder / "b").write_text("the wheel turns the water. " * 40)
        size = ["--length", 8]
        for text, code in ranks(["--data", "a", *size], ["--data", "b", *size]):
            self.assertEqual(code, 2, text)
            self.assertRegex(text, r"data \(names, sizes or checksum\): 1080 bytes, CRC-32 \d+ on rank 1, 1080 bytes, CRC-32 ")
        # Where they lie may differ.
        (self.folder / "b").write_text((self.folder / "a").read_text())
        for text, code in ranks(["--data", "a", *size, "--output", "one"], ["--data", "b", *size, "--output", "two"]):
            self.assertEqual(code, 0, text)

    def test_launch_starts_ranks_and_says_how_they_end(self):
        self.penstock("launch", "--processes", 2, "train", *SMALL, "--steps", 2, "--output", "run")
        self.assertEqual(list(self.losses()), [1, 2])
        result = self.penstock("launch", "--processes", 3, "train", *SMALL, "--steps", 2, code=2)
        self.assertIn("there are 3 processes, and 2 ranks for each of 1 replicas need 2.", result.stderr)
        self.assertIn("penstock launch: rank 0 exited with 2\n", result.stderr)

    def test_torchrun_starts_ranks(self):
        torchrun = [PEER_PYTHON, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", PENSTOCK, "train",
                    *map(str, SMALL), "--steps", "2", "--output", "run"]
        result = subprocess.run(torchrun, cwd=self.folder, capture_output=True, text=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(list(self.losses()), [1, 2])
        self.train(*SMALL, "--steps", 2, output="threads")
        self.assertEqual(self.losses(), self.losses("threads"))

    def test_an_error_of_a_rank_is_said_once(self):
        result = self.penstock("train", *SMALL, "--transport", "gloo", "--timeout", 0.001, code=2)
        self.assertEqual(result.stderr.count("penstock: "), 1, result.stderr)


if __name__ == "__main__":
    unittest.main()
