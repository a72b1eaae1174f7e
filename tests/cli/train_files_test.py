"""Tests of the files of penstock train: checkpoints, resuming, run directories, and the checks before the first step. See
train_case.py."""

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
import unittest

from command_case import PENSTOCK
from train_case import Case, KILLS, PROGRAMS, REFERENCE_PYTHON, SMALL, children_of


class Checkpoints(Case):
    def test_a_run_resumes_on_other_ranks(self):
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
                self.assertEqual(text, f"nothing to do: step 3 of {steps} is done.\n  Hint: continue with a larger --steps N.\n")
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
                    done = int(re.search(r"stopped after step (\d+); continue with --resume\.\n", text)[1])
                    self.assertEqual(self.names_in("kept"), [f"step-{done:08}"])
                    self.assertRegex(text, "throughput +[^0]")
                    self.assertIn('"name":"measured"', (self.folder / "run/timeline.html").read_text())
                    self.assertEqual(list(self.losses())[-1], done)

    def test_process_ranks_end_with_their_parent_process(self):
        words = [*SMALL, "--steps", 100000, "--microbatches", 8, "--transport", "gloo", "--checkpoint", "kept"]
        process = self.begun(words, after=2)
        ranks = children_of(process.pid)
        self.assertEqual(len(ranks), 2)
        process.kill()
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, -9)
        self.assert_ended(ranks)
        self.assertEqual(list((self.folder / "kept").glob("step-*")), [])

    def test_a_run_that_is_killed_at_any_time_resumes_to_the_same_losses(self):
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
                # Checkpoints are complete.
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
                            message="belongs to another model.\n  Found:    GPT, 6 layers of width 16 ")
        self.assert_refused("train", *words, "--resume", "--optimizer", "sgd",
                            message="has the state of optimizer adamw, expected sgd.\n  Hint: continue with --optimizer adamw.")
        damaged = self.folder / "kept/step-00000002/weights-0.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        self.assert_refused("train", *words, "--resume", message="weights-0.safetensors: is damaged: its checksum does not match.")
        # The older one is good.
        (self.folder / "kept/step-00000002").rename(self.folder / "aside")
        self.train(*words, "--resume")

    def test_checkpoints_of_different_runs_are_not_mixed(self):
        words = [*SMALL, "--checkpoint", "kept", "--steps"]
        self.train(*words, 1)
        runs = [self.run_of("kept/step-00000001")]
        self.train(*words, 2, "--resume")
        runs.append(self.run_of("kept/step-00000002"))
        self.train(*SMALL, "--checkpoint", "other", "--steps", 3, output="elsewhere")
        runs.append(self.run_of("other/step-00000003"))
        self.assertEqual(runs[0], runs[1])
        self.assertNotEqual(runs[0], runs[2])
        (self.folder / "other/step-00000003").rename(self.folder / "kept/step-00000003")
        self.assert_refused("train", *words, 4, "--output", "run", "--resume",
                            message="kept: has checkpoints of different runs: step-00000001 and step-00000003.\n  Hint: move "
                                    "those of one run to another directory; each can still be used by its path.")

    def run_of(self, checkpoint):
        return json.loads((self.folder / checkpoint / "manifest.json").read_text())["run"]

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
        it_is = "step-00000001: belongs to another model.\n  Found:    an exported model with 84 parameters of 2938 elements\n"
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
        found = subprocess.run([REFERENCE_PYTHON, "-W", "ignore", "-c", script], cwd=self.folder, capture_output=True, text=True, timeout=120)
        self.assertEqual(found.stdout, "blocks.0.before_attention.bias\n", found.stderr)


class Directories(Case):
    def test_files_of_an_earlier_run_are_rejected_or_overwritten(self):
        words = ["--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2, "--checkpoint", "kept"]
        self.train(*words, "--steps", 6, "--checkpoint-every", 2)
        before = self.names_in("kept")
        metrics = (self.folder / "run/metrics.jsonl").read_bytes()
        hint = "\n  Hint: --resume continues that run, --overwrite starts a new one, "
        for transport in ("threads", "gloo"):
            self.assert_refused("train", *words, "--steps", 3, "--output", "other", "--transport", transport,
                                message="kept: has checkpoints of an earlier run, the last of them step-00000006."
                                + hint + "--checkpoint DIR writes elsewhere.")
            self.assert_refused("train", "--steps", 3, "--output", "run", "--transport", transport,
                                message="run/metrics.jsonl: has the metrics of an earlier run."
                                + hint + "--output DIR writes elsewhere.")
        self.assertEqual(self.names_in("kept"), before)
        self.assertEqual((self.folder / "run/metrics.jsonl").read_bytes(), metrics)
        # The directory of a run that did not start is removed.
        self.assertFalse((self.folder / "other").exists())
        text = self.train(*words, "--steps", 3)
        self.assertIn("step 3: checkpoint kept/step-00000003\n", text)
        self.assertEqual(self.names_in("kept"), ["step-00000003"])
        self.assertEqual(list(self.losses()), [1, 2, 3])
        self.assertIn("resuming after step 3\n", self.train(*words, "--steps", 4, "--resume"))

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
        self.assertIn("run/metrics.jsonl: removed 2 lines after step 2\n", text)
        self.assertTrue(metrics.read_text().startswith(kept))
        # The curve has a gap where the loss was not a number, and each other loss at its step.
        curve = re.search(r'"curve":({"first":.*?})', (self.folder / "run/timeline.html").read_text())[1]
        losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines() if '"loss"' in line]
        self.assertIsNone(losses[0])
        self.assertEqual(json.loads(curve), {"first": 1, "name": "Loss", "values": losses})
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
                # The lock was released with the process.
                self.train(*SMALL, "--steps", 1, "--checkpoint", "kept")
                self.assertEqual(self.names_in("kept"), ["step-00000001"])
                self.assertFalse((self.folder / "other").exists())

    def test_output_and_checkpoints_may_be_one_directory(self):
        self.train(*SMALL, "--steps", 1, "--checkpoint", "run")
        self.assertEqual(self.names_in("run"), ["config.json", "costs.json", "metrics.jsonl", "step-00000001", "timeline.html"])


class Preflight(Case):
    """Errors that are found before the first step."""

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
                    ('"args.0": torch.ones(12, 4)', "has no 'target', which the loss mse compares"),
                    ('"x": torch.ones(12, 4), "target": torch.ones(12, 2)', "the input 'args.0' is missing; found x")):
                with self.subTest(name=name, tensors=tensors):
                    self.python(f"save_tensors({{{tensors}}}, 'data/{name}.safetensors')")
                    self.assert_nothing_ran(*words, message=f"data/{name}.safetensors(, rows 0 to 2)?: .*" + message)
            file.write_bytes(good[:100])
            self.assert_nothing_ran(*words, message=f"data/{name}.safetensors: ")
            file.write_bytes(good)
        self.assertFalse((self.folder / "run").exists())

    def test_an_evaluation_is_tried_and_an_earlier_run_stays_until_then(self):
        x = '"args.0": torch.randn(12, 4)'
        good = "{" + x + ', "target": torch.zeros(12, dtype=torch.int64)}'
        self.batches(batch0=good, eval0=good)
        words = [f"{PROGRAMS}/pair.pt2", "--data", "data", "--loss", "cross_entropy", "--steps", 2, "--microbatches", 4,
                 "--checkpoint", "kept"]
        self.train(*words)
        before = {one: one.read_bytes() for name in ("run", "kept") for one in (self.folder / name).rglob("*") if one.is_file()}
        self.batches(eval0="{" + x + ', "target": torch.full((12,), 5)}')
        for more in ([], ["--transport", "gloo"]):
            message = "data/eval0.safetensors, rows 0 to 2: rank 1, stage 1, 1F0 .microbatch 0.: Target 5 is out of bounds."
            self.assert_nothing_ran(*words, *more, "--overwrite", message=message)
            self.assertEqual({one: one.read_bytes() for name in ("run", "kept") for one in (self.folder / name).rglob("*")
                              if one.is_file()}, before)

    def test_overwrite_keeps_an_earlier_run_until_the_first_step_has_succeeded(self):
        self.write_batches()
        model = os.path.join(PROGRAMS, "pair.pt2")
        words = [model, "--data", "data", "--loss", "mse", "--steps", 2, "--checkpoint", "kept", "--microbatches", 4]
        self.train(*words)
        before = {one: one.read_bytes() for name in ("run", "kept") for one in (self.folder / name).rglob("*") if one.is_file()}
        # The first loss is infinite.
        self.batches(**{f"batch-{i}": '{"args.0": torch.full((12, 4), 1e30), "target": torch.zeros(12, 2)}' for i in range(3)})
        for more in ([], ["--transport", "gloo"]):
            self.assert_refused("train", *words, "--output", "run", "--overwrite", *more, message="step 1, data/batch-")
            self.assertEqual({one: one.read_bytes() for name in ("run", "kept") for one in (self.folder / name).rglob("*")
                              if one.is_file()}, before)

    def test_a_directory_that_has_lost_its_manifest_is_neither_skipped_nor_replaced(self):
        self.train(*SMALL, "--steps", 4, "--checkpoint", "kept", "--checkpoint-every", 2)
        (self.folder / "kept/step-00000004/manifest.json").unlink()
        self.assert_refused("train", *SMALL, "--steps", 6, "--output", "run", "--checkpoint", "kept", "--resume",
                            message="kept/step-00000004: has no manifest.json.\n  Hint: move it away to use an older checkpoint")
        before = self.names_in("kept/step-00000004")
        (self.folder / "kept/step-00000004").rename(self.folder / "kept/aside")
        (self.folder / "kept/step-00000003").mkdir()
        (self.folder / "kept/step-00000003/mine").touch()
        (self.folder / "kept/step-00000003").rename(self.folder / "kept/step-00000002x")
        self.train(*SMALL, "--steps", 4, "--checkpoint", "kept", "--resume")
        self.assertEqual(self.names_in("kept/aside"), before)
        self.assertEqual(self.names_in("kept/step-00000002x"), ["mine"])

    def test_resuming_without_a_checkpoint_starts_a_new_run_and_keeps_metrics(self):
        words = [*SMALL, "--steps", 2, "--output", "run", "--checkpoint", "new", "--resume"]
        self.train(*SMALL, "--steps", 3)
        before = (self.folder / "run/metrics.jsonl").read_bytes()
        for number in (1, 2):
            text = self.penstock("train", *words).stdout
            self.assertIn("no checkpoint to resume from; the metrics of the earlier run are now in "
                          f"run/metrics-{number}.jsonl\n", text)
            self.assertEqual((self.folder / f"run/metrics-{number}.jsonl").read_bytes(), before)
            self.assertEqual(list(self.losses()), [1, 2])
            before = (self.folder / "run/metrics.jsonl").read_bytes()
            shutil.rmtree(self.folder / "new")

    def test_targets_of_all_files_are_alike(self):
        x = '"args.0": torch.randn(12, 4)'
        words = [os.path.join(PROGRAMS, "pair.pt2"), "--data", "data", "--steps", 2, "--microbatches", 4, "--output", "run"]
        good = "{" + x + ', "target": torch.zeros(12, dtype=torch.long)}'
        for bad, message in (("torch.zeros(12, dtype=torch.int32)", "the loss cross_entropy takes class indices of int64, or "
                              "probabilities: the target is a int32 tensor of shape [12]."),
                             ("torch.zeros(12, 2)", "the target is a float32 tensor of shape [12, 2], and that of "),
                             ("torch.zeros(12, 1, dtype=torch.long)", "the target is a int64 tensor of shape [12, 1], and that of ")):
            for name in ("z", "evalz"):
                for one in (self.folder / "data").glob("*"):
                    one.unlink()
                self.batches(a=good, eval0=good, **{name: "{" + x + ', "target": ' + bad + "}"})
                self.assert_refused("train", *words, "--loss", "cross_entropy", "--dry-run", message=message)

    def test_a_batch_file_that_is_cut_short_meanwhile_is_named(self):
        self.write_batches()
        process = self.begun([os.path.join(PROGRAMS, "pair.pt2"), "--data", "data", "--loss", "mse", "--steps", 10**6,
                              "--microbatches", 4, "--overwrite"], after=5, stderr=subprocess.PIPE)
        for one in (self.folder / "data").glob("*.safetensors"):
            os.truncate(one, 100)
        _, text = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 2)
        self.assertRegex(text, r"^penstock: data/batch-\d\.safetensors: ")

    def test_a_dry_run_shows_what_a_run_would_take_and_writes_nothing(self):
        for more in ([], ["--transport", "gloo"], ["--data-parallel", 2, "--shard"]):
            text = self.penstock("train", *SMALL, "--steps", 500, "--microbatches", 4, "--checkpoint", "kept", "--dry-run",
                                 *more).stdout
            self.assertRegex(text, r"2 stages on 2 ranks \((threads|processes)\), 1F1B, 4 microbatches")
            self.assertRegex(text, r"\nstages +stage 0 on rank 0: \d+ parameters, [\d.]+ k elements\n +stage 1 on rank 1: ")
            self.assertRegex(text, r"\nbubble +[\d.]+ % measured, [\d.]+ % simulated\n")
            self.assertRegex(text, r"\nmemory +rank 0: [\d.]+ [kM]B measured, [\d.]+ [kM]B predicted\n +rank 1: ")
            self.assertRegex(text, r"\ntime +[\d.e-]+ s per step, about \d+:\d\d for 500 steps\n")
            self.assertRegex(text, r"\ncheckpoint +[\d.]+ [kM]B each; the last 3 are kept\nNothing was written\.\n$")
            self.assertEqual(list(self.folder.iterdir()), [])

    # A limit on the size of files acts like a full disk.
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


if __name__ == "__main__":
    unittest.main()
