"""Tests of the memory of penstock train: measured, predicted, drawn, and limited by --memory. See train_case.py."""

import json
import os
import re
import subprocess
import unittest

from command_case import PENSTOCK
from train_case import Case

# Large activations beside small weights.
WIDE = ["--digits", 1, "--rows", 64, "--layers", 8, "--width", 64, "--heads", 2, "--steps", 2]


class Memory(Case):
    def simulated_peaks(self, *words, costs="run/costs.json"):
        return json.loads(self.penstock("schedule", "simulate", *words, "--json", "--costs", costs).stdout)["peak_bytes"]

    def assert_near(self, predicted, measured, share=0.1):
        for found, expected in zip(predicted, measured, strict=True):
            self.assertAlmostEqual(found, expected, delta=share * expected)

    def test_writes_the_costs_that_the_simulator_reads(self):
        common = ["--digits", 1, "--rows", 64, "--layers", 8, "--width", 64, "--heads", 2, "--steps", 4, "--ranks", 2]
        for words in (["GPipe"], ["GPipe", "--recompute", "stages"], ["ZBVZeroBubble"], ["1F1B", "--transport", "gloo"]):
            with self.subTest(words=words):
                text = self.train(*common, "--schedule", *words, output="run")
                costs = json.loads((self.folder / "run/costs.json").read_text())
                self.assertEqual(costs["version"], 2)
                recompute = ["--recompute", "stages"] if "--recompute" in words else []
                predicted = self.simulated_peaks(words[0], "--ranks", 2, "--microbatches", 8, *recompute)
                self.assert_near(predicted, self.peaks())
                # There is one model of memory: the command prints the same numbers.
                printed = [float(number) for number in re.findall(r"([\d.]+) MB predicted", text)]
                self.assert_near(printed, [bytes / 1e6 for bytes in predicted], share=0.01)
                self.assertEqual(costs["stages"][0]["message_bytes"] > 0, "gloo" in words)

    def test_predicts_recomputation_from_a_run_without_it(self):
        common = ["--digits", 1, "--rows", 64, "--layers", 8, "--width", 64, "--heads", 2, "--steps", 3]
        for size in (["--ranks", 2], ["--ranks", 1, "--stages", 4]):
            with self.subTest(size=size):
                self.train(*common, *size, "--schedule", "Interleaved1F1B" if "--stages" in size else "GPipe")
                name = ["Interleaved1F1B", "--ranks", 1, "--stages-per-rank", 4] if "--stages" in size else ["GPipe", "--ranks", 2]
                schedule = [*name, "--microbatches", 4 if "--stages" in size else 8, "--recompute", "stages"]
                predicted = self.simulated_peaks(*schedule)
                self.train(*common, *size, "--schedule", name[0], "--recompute", "stages", output="recomputed")
                self.assert_near(predicted, self.peaks("recomputed"))

    def test_predicts_what_the_loss_keeps(self):
        # The log-softmax of many tokens stays when the last stage is recomputed.
        common = ["--digits", 1, "--rows", 512, "--layers", 2, "--width", 32, "--heads", 2, "--steps", 2, "--ranks", 2,
                  "--schedule", "GPipe", "--microbatches", 16]
        self.train(*common, output="plain")
        schedule = ["GPipe", "--ranks", 2, "--microbatches", 16, "--recompute", "stages"]
        predicted = self.simulated_peaks(*schedule, costs="plain/costs.json")
        self.train(*common, "--recompute", "stages")
        self.assert_near(predicted, self.peaks())
        self.assert_near(self.simulated_peaks(*schedule), self.peaks())

    def test_counts_the_gradients_of_earlier_batches(self):
        common = ["--digits", 1, "--rows", 16, "--layers", 6, "--width", 256, "--heads", 2, "--steps", 2, "--ranks", 2,
                  "--optimizer", "sgd", "--momentum", 0]
        self.train(*common, output="plain")
        for more in ([], ["--transport", "gloo"], ["--data-parallel", 2], ["--data-parallel", 2, "--shard"]):
            with self.subTest(more=more):
                self.train(*common, "--accumulate", 2, *more)
                stages = json.loads((self.folder / "run/costs.json").read_text())["stages"]
                gradients = [stage["accumulated_bytes"] for stage in stages]
                self.assertGreater(min(gradients), 4e6)
                simulated = self.simulated_peaks("1F1B", "--ranks", 2, "--microbatches", 8)
                self.assert_near(simulated, self.peaks())
                if not more:
                    for peak, before, size in zip(self.peaks(), self.peaks("plain"), gradients, strict=True):
                        self.assertAlmostEqual(peak - before, size, delta=0.1 * size)

    def test_draws_the_memory_that_was_measured(self):
        common = ["--digits", 1, "--rows", 64, "--layers", 4, "--width", 64, "--heads", 2, "--steps", 4, "--ranks", 2]
        for transport in ("threads", "gloo"):
            with self.subTest(transport=transport):
                self.train(*common, "--transport", transport, "--memory", "1GB")
                drawn = self.timelines()
                self.assertEqual([rank["peak_bytes"] for rank in drawn["measured"]], self.peaks())
                simulated = self.simulated_peaks("1F1B", "--ranks", 2, "--microbatches", 8)
                self.assertEqual([rank["peak_bytes"] for rank in drawn["simulated"]], simulated)
                for measured, simulated in zip(drawn["measured"], drawn["simulated"], strict=True):
                    self.assertGreater(min(measured["memory"]["bytes"]), 0)
                    self.assertLessEqual(max(measured["memory"]["bytes"]), measured["peak_bytes"])
                    self.assertNotEqual(measured["memory"]["bytes"], simulated["memory"]["bytes"])
                    self.assertEqual((measured["capacity"], simulated["capacity"]), (1e9, 1e9))

    def hints(self, *words):
        """Returns the options that the refusal of a run names, and the bytes that it says they would take."""
        error = self.refuses("train", *words, "--output", "refused", message=" of memory for its tensors, and --memory allows ")
        self.assertFalse((self.folder / "refused/metrics.jsonl").exists())
        found = re.search(r"Hint: it would fit with (.*)\.\n", error)
        self.assertIsNotNone(found, error)
        hints = [re.fullmatch(r"(.*) \(([\d.]+) MB\)", hint) for hint in found[1].split(", or ")]
        return {hint[1]: 1e6 * float(hint[2]) for hint in hints}

    def test_refuses_a_run_that_needs_more_memory_than_there_is(self):
        cases = ((["--ranks", 2, "--schedule", "GPipe"], 0.7, "--recompute stages", "--recompute all", "--schedule 1F1B"),
                 (["--ranks", 2, "--schedule", "GPipe", "--transport", "gloo"], 0.7, "--recompute stages", "--schedule 1F1B"),
                 # Other schedules would cut the model into more stages.
                 (["--ranks", 2], 0.85, "--recompute all", "--microbatches 32"),
                 (["--schedule", "LoopedBFS"], 0.65, "--recompute stages", "--schedule ZBVZeroBubble"),
                 # What is recomputed stays so.
                 (["--ranks", 2, "--schedule", "GPipe", "--recompute", "stages"], 0.9, "--microbatches 32"),
                 # No single option is enough.
                 (["--ranks", 2, "--schedule", "GPipe", "--microbatches", 4], 0.46, "--recompute all --schedule 1F1B"))
        for words, share, *expected in cases:
            with self.subTest(words=words):
                self.train(*WIDE, *words, output="run")
                limit = share * max(self.peaks())
                options = [*WIDE, *words, "--memory", f"{limit:.0f}B"]
                hints = self.hints(*options)
                for hint in expected:
                    self.assertTrue(any(hint in found for found in hints), (hint, hints))
                # Following a hint keeps the cut, and the promise.
                stages = len(json.loads((self.folder / "run/costs.json").read_text())["stages"])
                for hint, promised in hints.items():
                    replaced = hint.split()
                    kept = list(options)
                    for name in replaced[::2]:
                        if name in kept:
                            del kept[kept.index(name):kept.index(name) + 2]
                    self.train(*kept, *replaced, output="followed")
                    self.assertLessEqual(max(self.peaks("followed")), 1.02 * limit, hint)
                    self.assertAlmostEqual(max(self.peaks("followed")), promised, delta=0.1 * promised, msg=hint)
                    self.assertEqual(len(json.loads((self.folder / "followed/costs.json").read_text())["stages"]), stages, hint)

    def test_accepts_a_run_that_fits(self):
        for words in (["--schedule", "GPipe"], ["--schedule", "ZBVZeroBubble"], ["--data-parallel", 2, "--shard"]):
            with self.subTest(words=words):
                common = [*WIDE, "--ranks", 2, *words]
                self.train(*common, output="free")
                peak = max(self.peaks("free"))
                self.train(*common, "--memory", f"{1.15 * peak:.0f}B", output="run")
                # The trial before the run has no effect on it.
                self.assertEqual(self.losses(), self.losses("free"))
                self.assertIn("Nothing was written.", self.penstock("train", *common, "--memory", "1GB", "--dry-run", "--output", "dry").stdout)
                self.refuses("train", *common, "--memory", f"{0.85 * peak:.0f}B", message=" of memory for its tensors, ")

    def test_has_one_copy_of_the_weights_at_a_time(self):
        (self.folder / "data").mkdir()
        self.python("""
model = torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.Linear(3000, 3000)).train()
for i in range(2):
    save_tensors({"args.0": torch.randn(4, 3000), "target": torch.randn(4, 3000)}, f"data/batch-{i}.safetensors")
torch.export.save(torch.export.export(model, (torch.ones(1, 3000),)), "large.pt2")
""")
        weights = 2 * 3000 * 3000 * 4

        def peak(*words):
            command = [PENSTOCK, "train", "large.pt2", "--data", "data", "--loss", "mse", "--steps", "3", "--stages", "2",
                       "--microbatches", "4", "--overwrite", *words]
            process = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL,
                                       stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, 1024 * usage.ru_maxrss

        code, without = peak()
        self.assertEqual(code, 0)
        code, checked = peak("--memory", "1GB")
        self.assertEqual(code, 0)
        # Freed memory of the trial may stay in the allocator, but not another copy of the weights.
        self.assertLess(checked, without + 0.75 * weights)
        # What is known from the file is refused without loading it.
        code, refused = peak("--memory", "10MB")
        self.assertEqual(code, 2)
        self.assertLess(refused, without - 2 * weights)

    def test_microbatches_of_hints_can_be_split(self):
        common = ["--digits", 1, "--rows", 8, "--layers", 4, "--width", 64, "--heads", 2, "--steps", 2, "--ranks", 2,
                  "--microbatches", 8, "--schedule", "GPipe"]
        self.train(*common)
        hints = self.hints(*common, "--memory", f"{0.9 * max(self.peaks()):.0f}B")
        self.assertFalse(any("--microbatches" in hint for hint in hints), hints)

    def test_refuses_a_run_whose_weights_alone_need_more(self):
        self.refuses("train", "--digits", 1, "--layers", 8, "--memory", "1kB", message="of memory for its weights, gradients and optimizer state, and --memory allows 1kB.\n"
                     "  Hint: cut the model into more stages on more ranks.\n")
        self.refuses("train", "--digits", 1, "--layers", 8, "--data-parallel", 2, "--memory", "1kB",
                     message="  Hint: cut the model into more stages on more ranks, or shard it over replicas with --shard.\n")
        self.refuses("train", "--memory", "much", message="--memory: 'much' should be a size above 0 with its unit, such as 512MiB, 2GB or 4096B")
        csv = self.folder / "lowered.csv"
        csv.write_text(self.penstock("schedule", "export", "1F1B", "--ranks", 2, "--microbatches", 2, "--lowered").stdout)
        self.refuses("train", "--csv", csv, "--memory", "1GB", message="--memory needs a schedule without messages, which are added when it is lowered.\n"
                     "  Hint: give a CSV that was exported without --lowered.")

    def test_predicts_the_memory_of_process_ranks_within_ten_percent(self):
        for schedule in ("1F1B", "ZBVZeroBubble"):
            text = self.train("--rows", 32, "--layers", 4, "--width", 64, "--steps", 3, "--ranks", 2, "--schedule", schedule,
                              "--transport", "gloo")
            ranks = re.findall(r"rank \d: ([\d.]+) MB measured, ([\d.]+) MB predicted", text)
            self.assertEqual(len(ranks), 2, text)
            for measured, predicted in ranks:
                self.assertAlmostEqual(float(predicted), float(measured), delta=0.1 * float(measured))

    def test_initialises_a_model_that_was_exported_without_memory(self):
        self.python("""
for name, places in (("plain", False), ("places", True)):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.norm, self.head = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
            if places:
                self.places = torch.nn.Parameter(torch.empty(8))
        def forward(self, x):
            x = self.norm(self.enter(x))
            return self.head(x + self.places if places else x)
    with torch.device("meta"):
        torch.export.save(torch.export.export(Model().train(), (torch.zeros(3, 4),)), f"{name}.pt2")
""")
        self.write_batches()
        common = ["--data", "data", "--loss", "mse", "--steps", 3, "--stages", 2, "--microbatches", 4]
        losses = {}
        for words in ([], ["--schedule", "Interleaved1F1B", "--ranks", 1], ["--transport", "gloo", "--memory", "1GB"], ["--seed", 1]):
            self.train("plain.pt2", *common, *words, "--checkpoint", "kept")
            losses[" ".join(map(str, words))] = self.losses()
        first, *others, seeded = losses.values()
        self.assertEqual(others, [first] * 2)
        self.assertNotEqual(seeded, first)
        self.train("plain.pt2", *common, "--weights", "kept")
        inputs = ["--inputs", "data/eval-0.safetensors", "--output", "out.safetensors"]
        self.penstock("run", "plain.pt2", *inputs, "--weights", "kept")
        self.refuses("run", "plain.pt2", *inputs, message="has no values: the model was exported on the meta device.\n"
                     "  Hint: give the values of all weights (--weights), ")
        self.refuses("train", "places.pt2", *common, "--output", "refused", message="choose a standard deviation for such weights (--init-std)")
        self.train("places.pt2", *common, "--init-std", 0.02)
        # What the weights lack is drawn.
        self.python("save_tensors({'places': torch.full((8,), 3.0)}, 'places.safetensors')")
        self.train("places.pt2", *common, "--weights", "places.safetensors", "--checkpoint", "partial")
        self.penstock("export", "partial", "-o", "trained.safetensors")
        self.assertTrue((self.folder / "trained.safetensors").exists())
        self.refuses("export", "partial", "--pt2", "trained.pt2", message="was exported on the meta device, and its file has no room for weights.")

    def test_counts_buffers_and_measures_microbatches_without_targets(self):
        (self.folder / "data").mkdir()
        # The first microbatch of each batch has no target that counts.
        self.python("""
class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(256, 512))
        self.first, self.narrow, self.second = torch.nn.Linear(512, 512), torch.nn.Linear(512, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return self.second(self.narrow(torch.relu(self.first(x) * self.mask))).transpose(1, 2)
for i in range(2):
    target = torch.full((32, 256), -100)
    target[8:] = 1
    save_tensors({"args.0": torch.randn(32, 256, 512), "target": target}, f"data/batch-{i}.safetensors")
rows = torch.export.Dim("rows")
torch.export.save(torch.export.export(Masked().train(), (torch.ones(4, 256, 512),), dynamic_shapes=({0: rows},)), "masked.pt2")
""")
        common = ["masked.pt2", "--data", "data", "--loss", "cross_entropy", "--steps", 2, "--at", "second", "--microbatches", 4,
                  "--schedule", "GPipe"]
        self.train(*common)
        # Nearly all of it is on the first rank.
        self.assert_near(self.simulated_peaks("GPipe", "--ranks", 2, "--microbatches", 4)[:1], self.peaks()[:1])
        costs = json.loads((self.folder / "run/costs.json").read_text())
        self.assertEqual(costs["stages"][0]["parameter_bytes"], 4 * (512 * 512 + 512 + 256 * 512 + 512 * 16 + 16))
        self.train(*common, "--memory", f"{1.15 * max(self.peaks()):.0f}B", output="other")
        self.refuses("train", *common, "--memory", f"{0.85 * max(self.peaks()):.0f}B", "--output", "other", "--overwrite",
                     message=" of memory for its tensors, ")

    def test_recomputation_changes_memory_but_not_losses(self):
        common = ["--digits", 1, "--rows", 32, "--layers", 4, "--width", 32, "--heads", 2, "--steps", 2, "--dropout", 0.1,
                  "--schedule", "GPipe", "--ranks", 2]
        self.train(*common, output="plain")
        plain, memory = self.losses("plain"), self.peaks("plain")
        for words in (["all"], ["stages"], ["blocks.0", "blocks.3"]):
            for transport in ("threads", "gloo"):
                with self.subTest(words=words, transport=transport):
                    self.train(*common, "--recompute", *words, "--transport", transport, output="recomputed")
                    self.assertEqual(self.losses("recomputed"), plain)
                    if transport == "threads":
                        self.assertLess(sum(self.peaks("recomputed")), 0.9 * sum(memory))
        self.refuses("train", "--recompute", "all", "model.pt2", message="--recompute all model.pt2: 'all' stands alone.")
        self.refuses("train", *common, "--recompute", "blocks.4",
                     message="a GPT cannot have a module 'blocks.4' that is recomputed: its modules are blocks.0 to blocks.3.")


if __name__ == "__main__":
    unittest.main()
