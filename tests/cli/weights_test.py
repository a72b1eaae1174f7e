"""Tests of --weights, penstock export and penstock eval. PENSTOCK names the command, PENSTOCK_PROGRAMS what
models.py has written, and REFERENCE_PYTHON a Python with torch."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from command_case import CommandCase
from safetensors_files import read_tensors, read_tensors_and_metadata, write_tensors

PROGRAMS = os.environ["PENSTOCK_PROGRAMS"]
REFERENCE_PYTHON = os.environ["REFERENCE_PYTHON"]
REFERENCE = pathlib.Path(__file__).resolve().parent / "weights_reference.py"

TIED = os.path.join(PROGRAMS, "tied.pt2")
PAIR = os.path.join(PROGRAMS, "pair.pt2")
NAMES = ["embedding.weight", "frozen.bias", "frozen.weight", "head.weight", "scale.factor"]


class Case(CommandCase):
    @classmethod
    def setUpClass(cls):
        cls.given = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.given.cleanup)
        cls.data = pathlib.Path(cls.given.name) / "data"
        cls.weights = pathlib.Path(cls.given.name) / "weights"
        cls.data.mkdir()
        cls.weights.mkdir()
        cls.reference("data", cls.data)
        cls.reference("weights", TIED, 1, cls.weights)

    @staticmethod
    def reference(*words):
        result = subprocess.run([REFERENCE_PYTHON, REFERENCE, *map(str, words)], capture_output=True, text=True, timeout=300)
        if result.returncode != 0:
            raise AssertionError(result.stderr)
        return result.stdout

    def assert_close(self, expected, found, tolerance=1e-5):
        self.assertEqual(len(expected), len(found))
        scale = max(1.0, *map(abs, expected))
        self.assertLessEqual(max(abs(a - b) for a, b in zip(expected, found)), tolerance * scale)

    def run_outputs(self, model, *words):
        self.answers("run", model, "--inputs", self.data / "eval-0.safetensors", "--output", "out.safetensors", *words)
        return read_tensors(self.folder / "out.safetensors")["output.0"]

    def reference_outputs(self, model):
        self.reference("run", model, self.data / "eval-0.safetensors", self.folder / "expected.safetensors")
        return read_tensors(self.folder / "expected.safetensors")["output.0"]

    def train(self, *words, model=TIED, checkpoint="kept"):
        return self.answers("train", model, "--data", self.data, "--loss", "cross_entropy", "--microbatches", 4,
                            "--checkpoint", checkpoint, "--output", f"run-of-{checkpoint}", *words)


class Weights(Case):
    def test_run_takes_every_form_of_weights(self):
        own = self.run_outputs(TIED)
        whole = self.run_outputs(TIED, "--weights", self.weights / "whole.safetensors")
        self.assertNotEqual(own, whole)
        for form in ("hf", "hf/model.safetensors", "sharded"):
            self.assertEqual(self.run_outputs(TIED, "--weights", self.weights / form), whole, form)
        for words in (["--stages", 2], ["--stages", 2, "--transport", "gloo"]):
            self.assertEqual(self.run_outputs(TIED, "--weights", self.weights / "hf", *words), whole, words)

    def test_run_prints_rows_a_second_and_ignores_the_target(self):
        for words in ([], ["--stages", 2, "--transport", "gloo"]):
            text = self.answers("run", TIED, "--inputs", self.data / "eval-0.safetensors", "--output", "out.safetensors", *words)
            self.assertRegex(text, r"^output\.0 float32\[8, 3, 8\]\n8 rows, [\d.]+( k)? rows/s\n$")

    def test_check_takes_weights_and_ignores_the_target(self):
        text = self.answers("check", TIED, "--stages", 2, "--weights", self.weights / "hf", "--inputs",
                            self.data / "eval-0.safetensors", "--dump", "dump.safetensors")
        self.assertRegex(text, "equal to one process")
        found = read_tensors(self.folder / "dump.safetensors")["output.0"]
        self.assertEqual(found, self.run_outputs(TIED, "--weights", self.weights / "hf"))

    def test_differences_to_the_model_are_listed(self):
        write_tensors(self.folder / "other.safetensors",
                      {"embedding.weight": [1, 2], "extra": [1], "scale.factor": [3], "scale.shift": [1]})
        expected = (f"penstock: other.safetensors: does not fit {TIED}:\n"
                    "  tensor 'embedding.weight': found float32[2], expected float32[8, 4].\n"
                    "  tensor 'frozen.weight' is missing: the model has float32[4, 4].\n"
                    "  tensor 'frozen.bias' is missing: the model has float32[4].\n"
                    "  tensor 'extra' is unexpected: found float32[1].\n")
        for words in (["run", TIED, "--inputs", self.data / "eval-0.safetensors", "--output", "out.safetensors"],
                      ["check", TIED, "--transport", "gloo"],
                      ["train", TIED, "--data", self.data, "--loss", "cross_entropy", "--checkpoint", "kept"],
                      ["eval", TIED, "--data", self.data, "--loss", "cross_entropy"]):
            result = self.penstock(*words, "--weights", "other.safetensors", code=2)
            self.assertEqual((result.stdout, result.stderr), ("", expected), words)
        self.assertEqual([one.name for one in self.folder.iterdir()], ["other.safetensors"])
        self.refuses("run", TIED, "--inputs", self.data / "eval-0.safetensors", "--output", "out.safetensors", "--weights", "none",
                     message="none: there is no such file or directory.")

    def test_training_starts_from_them(self):
        # With a learning rate of 0, the checkpoint has the weights that were read.
        words = ["--learning-rate", 0, "--steps", 1, "--weight-decay", 0]
        text = self.train(*words, "--weights", self.weights / "hf")
        self.assertIn(f"initial weights: {self.weights / 'hf'}\n", text)
        self.answers("export", "kept", "-o", "one.safetensors")
        self.assertEqual(read_tensors(self.folder / "one.safetensors"), read_tensors(self.weights / "whole.safetensors"))
        # On other ranks, and from a checkpoint.
        self.train(*words, "--weights", "kept", "--stages", 2, "--transport", "gloo", checkpoint="again")
        self.answers("export", "again", "-o", "two.safetensors")
        self.assertEqual(read_tensors_and_metadata(self.folder / "one.safetensors"), read_tensors_and_metadata(self.folder / "two.safetensors"))

    def test_a_gpt_starts_from_a_checkpoint(self):
        small = ["--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2]
        still = [*small, "--learning-rate", 0, "--weight-decay", 0, "--steps", 1, "--microbatches", 4]
        self.answers("train", *small, "--steps", 3, "--checkpoint", "kept")
        for seed, words in enumerate((["--ranks", 1], ["--ranks", 4, "--transport", "gloo"], ["--data-parallel", 2, "--shard"])):
            self.answers("train", *still, "--seed", seed, "--weights", "kept", "--checkpoint", f"again-{seed}",
                         "--output", f"run-{seed}", *words)
            for name in ("kept", f"again-{seed}"):
                self.answers("export", name, "-o", name + ".safetensors")
            first, second = (read_tensors(self.folder / f"{name}.safetensors") for name in ("kept", f"again-{seed}"))
            self.assertEqual(first, second, words)
        # Sums of two digits are longer.
        self.refuses("train", "--digits", 2, *small[2:], "--weights", "kept",
                     message="kept/step-00000003: does not fit the GPT, 2 layers of width 16 with 2 heads, texts of 8 bytes:\n"
                             "  tensor 'places': found float32[5, 16], expected float32[8, 16].\n")

    def test_a_checkpoint_that_is_resumed_takes_precedence(self):
        self.train("--steps", 2)
        self.answers("export", "kept", "-o", "before.safetensors")
        text = self.train("--steps", 2, "--resume", "--weights", self.weights / "hf")
        self.assertNotIn("initial weights", text)
        self.train("--steps", 3, "--resume", "--learning-rate", 0, "--weight-decay", 0, "--weights", self.weights / "hf")
        self.answers("export", "kept", "-o", "after.safetensors")
        self.assertEqual(read_tensors_and_metadata(self.folder / "before.safetensors"), read_tensors_and_metadata(self.folder / "after.safetensors"))


class Export(Case):
    def test_one_file_has_the_models_own_names(self):
        self.train("--steps", 4, "--stages", 2)
        text = self.answers("export", "kept", "-o", "model.safetensors")
        self.assertEqual(text, "model.safetensors: 5 tensors of kept/step-00000004\n")
        tensors, metadata = read_tensors_and_metadata(self.folder / "model.safetensors")
        # scale.shift is not in the model's state_dict.
        self.assertEqual(sorted(tensors), NAMES)
        self.assertEqual(tensors["embedding.weight"], tensors["head.weight"])
        self.assertEqual(metadata, {"format": "pt"})
        trained = self.run_outputs(TIED, "--weights", "kept")
        self.assertEqual(self.run_outputs(TIED, "--weights", "model.safetensors"), trained)
        self.assertNotEqual(self.run_outputs(TIED), trained)

    def test_pytorch_reads_an_archive_with_the_weights(self):
        self.train("--steps", 4, "--stages", 2)
        text = self.answers("export", "kept", "-o", "model.safetensors", "--pt2", "trained.pt2")
        self.assertIn(f"trained.pt2: {TIED} with the weights of kept/step-00000004\n", text)
        trained = self.run_outputs(TIED, "--weights", "kept")
        self.assertEqual(self.run_outputs("trained.pt2"), trained)
        self.assert_close(self.reference_outputs(self.folder / "trained.pt2"), trained)
        self.assertGreater(max(abs(a - b) for a, b in zip(self.reference_outputs(TIED), trained)), 1e-3)
        self.reference("state", self.folder / "trained.pt2", self.folder / "state.safetensors")
        self.assertEqual(read_tensors(self.folder / "state.safetensors"), read_tensors(self.folder / "model.safetensors"))
        # The same model from elsewhere.
        shutil.copy(TIED, self.folder / "copy.pt2")
        self.answers("export", self.weights / "sharded", "--model", "copy.pt2", "--pt2", "other.pt2")
        self.assertEqual(self.run_outputs("other.pt2"), self.run_outputs(TIED, "--weights", self.weights / "hf"))
        self.assert_close(self.reference_outputs(self.folder / "other.pt2"), self.run_outputs("other.pt2"))
        # The result is an exported model like any other.
        self.train("--steps", 1, "--weights", "kept", model="trained.pt2", checkpoint="further")

    def test_reports_errors_and_writes_nothing(self):
        (self.folder / "kept").mkdir()
        self.refuses("export", "kept", "-o", "a.safetensors", message="kept: has no weights: neither a checkpoint of Penstock, nor ")
        self.refuses("export", self.weights / "hf", message="there is nothing to write.\n  Hint: -o model.safetensors, ")
        self.refuses("export", self.weights / "hf", "-o", "x.pt", "--pt2", "./x.pt",
                     message="x.pt: is named by --output and by --pt2.")
        self.refuses("export", self.weights / "hf", "-o", "a.pt2",
                     message="a.pt2: --output writes safetensors.\n  Hint: --pt2 a.pt2 writes an exported model.")
        self.refuses("export", self.weights / "hf", "-o", "none/a.safetensors", message="none/a.safetensors: cannot be written: there is no directory none.")
        self.refuses("export", self.weights / "hf", "--pt2", "a.pt2",
                     message="/hf: does not say which exported model it belongs to.\n  Hint: name the exported model with --model MODEL.pt2.")
        self.refuses("export", self.weights / "hf", "--model", PAIR, "-o", "a.safetensors", "--pt2", "a.pt2",
                     message=f"/hf: does not fit {PAIR}:\n  tensor 'first.weight' is missing")
        shutil.copy(TIED, self.folder / "model.pt2")
        self.refuses("export", self.weights / "hf", "--model", "model.pt2", "--pt2", "./model.pt2",
                     message="./model.pt2: is the model itself.\n  Hint: --pt2 names the file to write, and --model the one to read.")
        self.refuses("export", self.weights / "hf", "--model", TIED, "-o", "a.safetensors", message="--model requires --pt2")
        self.assertEqual(sorted(one.name for one in self.folder.iterdir()), ["kept", "model.pt2"])
        self.assertEqual((self.folder / "model.pt2").read_bytes(), pathlib.Path(TIED).read_bytes())
        # The exported model of the run no longer exists.
        (self.folder / "kept").rmdir()
        self.train("--steps", 1, model="model.pt2")
        (self.folder / "model.pt2").unlink()
        self.refuses("export", "kept", "--pt2", "a.pt2", message=f"kept/step-00000001: belongs to {self.folder / 'model.pt2'}, which does not exist.\n  Hint: name the exported model with --model ")


class Eval(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.models = pathlib.Path(cls.given.name) / "models"
        cls.models.mkdir()
        cls.reference("models", cls.models)

    def metrics(self, *words):
        return json.loads(self.answers("eval", *words, "--json"))

    def assert_metrics(self, expected, found):
        for name, value in expected.items():
            self.assertAlmostEqual(found[name], value, delta=1e-5 * max(1, abs(value)), msg=name)

    def test_gives_the_metrics_of_the_whole_data(self):
        held_out = [self.data / f"eval-{i}.safetensors" for i in (0, 1)]
        expected = json.loads(self.reference("eval", TIED, "cross_entropy", *held_out))
        for words in ([], ["--stages", 2], ["--stages", 2, "--transport", "gloo"], ["--stages", 2, "--schedule", "GPipe"]):
            found = self.metrics(TIED, "--data", self.data, "--loss", "cross_entropy", *words)
            self.assert_metrics(expected, found)
            self.assertEqual((found["version"], found["batches"], found["rows"]), (1, 2, 16))
        text = self.answers("eval", TIED, "--data", held_out[0], "--loss", "cross_entropy")
        self.assertRegex(text, r"^loss +[\d.]+\naccuracy +[\d.]+ %\nperplexity +[\d.]+\n1 batch, 8 rows, [\d.]+( k)? rows/s\n$")

    def test_takes_weights(self):
        self.train("--steps", 30, "--learning-rate", 0.05)
        self.answers("export", "kept", "--pt2", "trained.pt2")
        held_out = [self.data / f"eval-{i}.safetensors" for i in (0, 1)]
        expected = json.loads(self.reference("eval", self.folder / "trained.pt2", "cross_entropy", *held_out))
        found = self.metrics(TIED, "--data", self.data, "--loss", "cross_entropy", "--weights", "kept")
        self.assert_metrics(expected, found)
        self.assertLess(found["loss"], self.metrics(TIED, "--data", self.data, "--loss", "cross_entropy")["loss"])

    def test_a_model_that_was_exported_for_evaluation(self):
        model = self.models / "classes.pt2"
        # Rows do not divide: 13 and 5.
        expected = json.loads(self.reference("eval", model, "cross_entropy", *sorted(self.models.glob("classes-*.safetensors"))))
        for words in ([], ["--microbatches", 3], ["--ranks", 2]):
            for file in self.models.glob("classes-*.safetensors"):
                shutil.copy(file, self.folder)
            found = self.metrics(model, "--data", self.folder, "--loss", "cross_entropy", *words)
            self.assert_metrics(expected, found)
            self.assertEqual(found["rows"], 18)

    def test_a_loss_that_is_not_of_classes(self):
        data = self.models / "squares-0.safetensors"
        expected = json.loads(self.reference("eval", self.models / "squares.pt2", "mse", data))
        found = self.metrics(self.models / "squares.pt2", "--data", data, "--loss", "mse")
        self.assert_metrics(expected, found)
        # The model's own loss is the same, and takes no target.
        own = self.metrics(self.models / "own_loss.pt2", "--data", self.models / "own_loss-0.safetensors")
        self.assert_metrics(expected, own)
        for metrics in (found, own):
            self.assertEqual(sorted(metrics), ["batches", "loss", "rows", "rows_per_second", "version"])

    def test_says_what_is_wrong(self):
        self.refuses("eval", TIED, message="--data is required")
        self.refuses("eval", TIED, "--data", "none", message="none: is not a directory with batches in safetensors files.")
        self.refuses("eval", TIED, "--data", self.folder, message="has no file NAME.safetensors to evaluate on.")
        self.refuses("eval", TIED, "--data", self.data, message="the loss output takes the model's output as the loss")


if __name__ == "__main__":
    unittest.main()
