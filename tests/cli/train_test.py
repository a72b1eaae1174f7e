"""Tests of penstock train, generate and launch: results and messages. See train_case.py."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import unittest

from command_case import PENSTOCK
from train_case import Case, PROGRAMS, REFERENCE_PYTHON, SMALL, WHOLE_GRID


class Training(Case):
    def test_learns_sums_and_shows_some(self):
        text = self.train("--digits", 1, "--rows", 64, "--layers", 2, "--width", 32, "--steps", 250, "--eval-every", 125)
        self.assertRegex(text, r"2 stages on 2 ranks \(threads\), 1F1B, 8 microbatches\n")
        self.assertRegex(text, r"step 250/250   loss 0\.\d+")
        self.assertRegex(text, r"step 125: evaluation loss [\d.]+, accuracy [\d.]+ %\n")
        self.assertRegex(text, r"memory +rank 0: [\d.]+ [kM]B measured, [\d.]+ [kM]B predicted\n +rank 1: ")
        self.assertRegex(text, r"Accuracy on 512 held-out sums: [\d.]+ %\n( +\d\+\d=\d\d( +wrong)?\n){6}")
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
        self.assertIn("Sample:\n", text)
        self.assertIn("step 30: checkpoint kept/step-00000030\n", text)
        # The sample is generated with the trained weights.
        generated = self.penstock("generate", "kept", "--bytes", 200, "--seed", 0).stdout
        self.assertEqual(text.partition("Sample:\n")[2], generated)
        sample = self.penstock("generate", "kept", "the water", "--bytes", 20, "--temperature", 0).stdout
        self.assertGreaterEqual(len(sample), len("the water") + 20 + 1)
        self.assertTrue(sample.startswith("the water"))
        again = self.penstock("generate", "kept/step-00000030", "the water", "--bytes", 20, "--temperature", 0, "--ranks", 1)
        self.assertEqual(again.stdout, sample)

    def test_writes_the_same_sample_on_any_ranks(self):
        (self.folder / "text").write_text("the water turns the wheel and the wheel turns the mill. " * 40)
        common = ["--data", "text", "--length", 16, "--rows", 16, "--layers", 2, "--width", 32, "--steps", 3]

        def sample(*words):
            return self.train(*common, *words).partition("Sample:\n")[2]

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
        self.assertRegex(text, r"step 60: evaluation loss [\d.]+\n")
        losses = self.losses()
        self.assertLess(losses[60], losses[1] / 2)
        # Another schedule, and replicas.
        for more in (["--schedule", "GPipe", "--ranks", 1, "--microbatches", 4],
                     ["--data-parallel", 2, "--microbatches", 2]):
            self.train(*words, *more, output="other")
            for step, loss in self.losses("other").items():
                self.assertAlmostEqual(loss, losses[step], delta=1e-2 * losses[step])
        self.assert_refused("generate", "kept", "x", message="has the weights of an exported model, not of a GPT.")

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
        subprocess.run([REFERENCE_PYTHON, "-W", "ignore", "-c", script, self.folder / "loss.pt2"], check=True, timeout=120)
        batch = '{"args.0": torch.randn(12, 4), "args.1": torch.randn(12, 2)}'
        self.batches(batch0=batch, eval0=batch)
        text = self.train("loss.pt2", "--data", "data", "--loss", "output", "--steps", 2, "--microbatches", 4)
        self.assertRegex(text, r"step 2: evaluation loss [\d.]+\n")

    def test_names_the_file_and_the_rows_of_bad_data(self):
        def refused(message, loss, **files):
            for name in ("data", "penstock-train"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self.batches(**files)
            result = self.penstock("train", f"{PROGRAMS}/pair.pt2", "--data", "data", "--loss", loss, "--steps", 1,
                                   "--microbatches", 4, code=2)
            self.assertIn(message, result.stderr)

        x = '"args.0": torch.randn(12, 4)'
        refused("penstock: data/a.safetensors, rows 0 to 2: rank 1, stage 1, 1F0 (microbatch 0): the loss mse compares each number "
                "of the output with one of the target, and their shapes differ: the output is a float32 tensor of shape [3, 2] "
                "and the target a float32 tensor of shape [3, 1].", "mse", a="{" + x + ', "target": torch.randn(12, 1)}')
        refused("shape [3, 2] and the target a float32 tensor of shape [3].", "mse", a="{" + x + ', "target": torch.randn(12)}')
        refused("penstock: data/a.safetensors, rows 6 to 8: rank 1, stage 1, 1F2 (microbatch 2): Target 5 is out of bounds.",
                "cross_entropy", a="{" + x + ', "target": torch.tensor([0] * 7 + [5] + [0] * 4)}')
        refused("penstock: data/a.safetensors, rows 0 to 2: rank 1, stage 1, 1F0 (microbatch 0): the loss cross_entropy takes class "
                "indices of int64, or probabilities in the shape of the output: the target is a float32 tensor of shape [3] and "
                "the output a float32 tensor of shape [3, 2].", "cross_entropy", a="{" + x + ', "target": torch.zeros(12)}')
        refused("penstock: data/a.safetensors: the arguments can be split into 3 only, and there are 4 microbatches.",
                "mse", a='{"args.0": torch.randn(3, 4), "target": torch.randn(3, 2)}')
        refused("penstock: data/a.safetensors: the target (float32 tensor of shape [10, 2]) has 10 rows, and args[0] ",
                "mse", a="{" + x + ', "target": torch.randn(10, 2)}')
        refused("penstock: data/a.safetensors, rows 0 to 1: args.0, dimension 0: found 2, expected 3, which is static.",
                "mse", a='{"args.0": torch.randn(8, 4), "target": torch.randn(8, 2)}')
        refused("penstock: step 1, data/a.safetensors: there is no target that counts: all of them are ignored.\n  Hint: check "
                "which target is ignored (--ignore-index), or skip such steps (--on-nonfinite skip).",
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
                                                r"NaN\.\n  The first parameter whose gradient is not finite is first\.weight of stage 0\.\n"
                                                r"  Hint: look at the data, lower the learning rate \(--learning-rate\), lower the "
                                                r"clipping norm \(--clip\), or skip such steps \(--on-nonfinite skip\)\.\n")
                # Nothing is written when it was the first step.
                shutil.rmtree(self.folder / "run", ignore_errors=True)
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
                self.assertIn("The 2 steps before it were skipped too.\n  Hint: allow more skipped steps in a row (--max-skipped).\n",
                              result.stderr)
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
        found = subprocess.run([REFERENCE_PYTHON, "-W", "ignore", "-c", script, f"{PROGRAMS}/pair.pt2", self.folder / "data/a.safetensors"],
                               capture_output=True, text=True, timeout=120)
        self.assertAlmostEqual(self.losses()[1], float(found.stdout), delta=1e-6, msg=found.stderr)

    def test_reads_options_from_a_file(self):
        (self.folder / "run.toml").write_text("digits = 1\nrows = 8\nlayers = 2\nwidth = 16\nheads = 2\nsteps = 3\n")
        (self.folder / "run.json").write_text(json.dumps({"digits": 1, "rows": 8, "layers": 2, "width": 16, "heads": 2,
                                                          "steps": 3, "shard": False}))
        self.train("--config", "run.toml", output="toml")
        self.train("--config", "run.json", output="json")
        self.assertEqual(self.losses("toml"), self.losses("json"))
        # The command line takes precedence, and config.json of a run is a configuration file itself.
        self.train("--config", "run.toml", "--steps", 2, output="line")
        self.assertEqual(list(self.losses("line")), [1, 2])
        resolved = json.loads((self.folder / "toml/config.json").read_text())
        self.assertEqual((resolved["digits"], resolved["steps"], resolved["schedule"]), (1, 3, "1F1B"))
        self.train("--config", "toml/config.json", output="again")
        self.assertEqual(self.losses("again"), self.losses("toml"))
        (self.folder / "wrong.toml").write_text("layer = 2\n")
        self.assert_refused("train", "--config", "wrong.toml",
                            message="wrong.toml: unknown option 'layer'.\n  Hint: did you mean layers?")
        (self.folder / "wrong.json").write_text('{"rows": "many"}')
        self.assert_refused("train", "--config", "wrong.json", message="wrong.json: ")

    def test_reports_usage_errors(self):
        self.assert_refused("train", "--data", "none", message="none: there is no such file or directory.")
        (self.folder / "short").write_text("abc")
        self.assert_refused("train", "--data", "short", "--length", 4,
                            message="short: has 3 bytes of text, and a sequence with the byte after it has 5.\n  Hint: use "
                                    "shorter sequences (--length N).")
        self.assert_refused("train", f"{PROGRAMS}/pair.pt2", "--layers", 2,
                            message="--layers is an option of the GPT, which is trained without MODEL.pt2; found ")
        self.assert_refused("train", "--stages", 9, message="a GPT of 4 layers cannot be cut into 9 stages")
        self.assert_refused("train", "--width", 10, "--heads", 4, message="the width must be divisible by the heads")
        self.assert_refused("train", os.path.join(PROGRAMS, "pair.pt2"), message="--data is missing: ")
        self.assert_refused("train", "--resume", message="--resume needs the directory of the checkpoints.\n  Hint: add --checkpoint DIR.")
        self.assert_refused("train", "--resume", "--overwrite", "--checkpoint", "kept",
                            message="--resume continues an earlier run, and --overwrite removes it: they exclude each other.")
        self.assert_refused("generate", "none", "x", message="none: there is no such checkpoint.")
        self.assert_refused("launch", message="the command to launch is missing.")


class Sameness(Case):
    def test_losses_are_those_of_one_rank(self):
        schedules = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
        common = [*SMALL, "--steps", 3, "--microbatches", 8]
        self.train(*common, "--ranks", 1, output="whole")
        whole = self.losses("whole")
        self.assertEqual(len(set(whole.values())), 3)
        for i, schedule in enumerate(schedules):
            for ranks in (1, 2, 4):
                # Only some on process ranks, which take a second to start.
                is_part = WHOLE_GRID or ranks == (2, 4)[i % 2]
                transports = ["threads", "gloo"] if is_part else ["threads"]
                for transport in transports:
                    with self.subTest(schedule=schedule, ranks=ranks, transport=transport):
                        self.train(*common, "--schedule", schedule, "--ranks", ranks, "--transport", transport,
                                   output="other")
                        self.assertEqual(self.losses("other"), whole)

    def test_replicas_agree_up_to_rounding(self):
        common = ["--digits", 1, "--rows", 16, "--layers", 2, "--width", 16, "--heads", 2, "--steps", 4]
        self.train(*common, "--microbatches", 4, output="one")
        for words in ([], ["--shard"], ["--transport", "gloo"], ["--transport", "gloo", "--shard"]):
            with self.subTest(words=words):
                self.train(*common, "--data-parallel", 2, "--microbatches", 2, *words, output="two")
                for step, loss in self.losses("two").items():
                    self.assertAlmostEqual(loss, self.losses("one")[step], delta=1e-4)


class Configuration(Case):
    def test_has_the_options_that_apply_and_no_others(self):
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
        # The configuration gives the same run from another directory.
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
        # Output paths are relative to the current directory.
        self.assertEqual(self.names_in("kept"), ["step-00000001"])
        self.assertFalse(json.loads((self.folder / "run/config.json").read_text())["shuffle"])

    def test_options_of_another_kind_of_model_are_refused(self):
        self.assert_refused("train", "--loss", "mse", message="--loss is an option of exported models, and MODEL.pt2 is missing.")
        self.assert_refused("train", "--no-shuffle", message="--shuffle is an option of exported models, and MODEL.pt2 is missing.")
        self.assert_refused("train", "--learning-rate", 0.1, "--min-lr", 0.2,
                            message="--min-lr is 0.2, above --learning-rate, 0.1, from which the learning rate decays to it.")

    def test_values_that_no_run_could_have_are_refused(self):
        for words, message in (
            (["--output", ""], "penstock train: --output: '' should be a path, and is empty"),
            (["--checkpoint", ""], "penstock train: --checkpoint: '' should be a path, and is empty"),
            (["--learning-rate", "1e39"],
             "penstock train: --learning-rate: '1e39' should be a number from 0 to 3.4e38, the largest of float32"),
        ):
            self.assertEqual(self.penstock("train", *words, code=2).stderr.splitlines()[0], message)

    def test_the_learning_rate_ends_at_its_minimum(self):
        rates = {}
        configurations = {}
        for minimum in (None, 0.001):
            self.train(*SMALL, "--steps", 50, "--warmup", 0, "--learning-rate", 0.01,
                       *([] if minimum is None else ["--min-lr", minimum]))
            lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
            rates[minimum] = [one["learning_rate"] for one in map(json.loads, lines) if "loss" in one]
            configurations[minimum] = json.loads((self.folder / "run/config.json").read_text())
        for minimum, end in ((None, 0.0005), (0.001, 0.001)):
            self.assertEqual(rates[minimum][0], 0.01)
            self.assertAlmostEqual(rates[minimum][-1], end, delta=1e-12)
            self.assertGreater(rates[minimum][-2], end)
            self.assertEqual(configurations[minimum]["min-lr"], end)

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

    def test_log_every_sets_the_interval_of_progress_lines(self):
        for words, steps in (([], [1, 2, 3, 4, 5, 6, 7]), (["--log-every", 3], [1, 3, 6, 7])):
            text = self.train(*SMALL, "--steps", 7, *words)
            self.assertEqual([int(one) for one in re.findall(r"^step (\d)/7 ", text, re.MULTILINE)], steps)


class Processes(Case):
    def start_ranks(self, *options, small=SMALL):
        """Starts a rank with each of these lists of options, as a scheduler would."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank, words in enumerate(options):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(options)), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port)}
            started.append(subprocess.Popen([PENSTOCK, "train", *map(str, [*small, *words])], cwd=self.folder,
                                            env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
        return started

    def test_all_ranks_end_with_the_code_of_the_one_that_was_stopped(self):
        words = ["--steps", 100000, "--checkpoint", "kept", "--output", "run"]
        for stopped in (0, 1):
            for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
                with self.subTest(rank=stopped, signal=number):
                    shutil.rmtree(self.folder / "run", ignore_errors=True)
                    shutil.rmtree(self.folder / "kept", ignore_errors=True)
                    ranks = self.start_ranks(words, words)
                    self.wait_for_steps(2)
                    ranks[stopped].send_signal(number)
                    for rank in ranks:
                        _, text = rank.communicate(timeout=60)
                        self.assertEqual(rank.returncode, code, text)
                    self.assertEqual(len(self.names_in("kept")), 1)

    def test_ranks_with_different_models_or_weights_are_rejected(self):
        self.write_batches()
        self.python("""
class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
for name in ("one", "two"):
    model = Pair().train()
    torch.export.save(torch.export.export(model, (torch.ones(3, 4),)), name + ".pt2")
    save_tensors(model.state_dict(), name + ".safetensors")
""")
        common = ["--data", "data", "--loss", "mse", "--steps", 1, "--stages", 2, "--microbatches", 4, "--overwrite"]

        def texts(*ranks):
            started = self.start_ranks(*([*words, *common] for words in ranks), small=[])
            return [(one.communicate(timeout=120)[1], one.returncode) for one in started]

        for text, code in texts(["one.pt2"], ["two.pt2"]):
            self.assertEqual(code, 2, text)
            self.assertRegex(text, r"\n  model \(checksum\): \d+ on rank 1, \d+ on rank 0\n")
        for text, code in texts(["one.pt2", "--weights", "one.safetensors"], ["one.pt2", "--weights", "two.safetensors"]):
            self.assertEqual(code, 2, text)
            self.assertRegex(text, r"\n  weights \(checksum\): \d+ on rank 1, \d+ on rank 0\n")
        for text, code in texts(["one.pt2"], ["one.pt2"]):
            self.assertEqual(code, 0, text)

    def test_a_timeout_may_be_arbitrarily_long(self):
        for timeout in ("1e10", "1e300"):
            for transport in ("threads", "gloo"):
                self.train(*SMALL, "--steps", 1, "--ranks", 2, "--transport", transport, "--timeout", timeout)

    def test_ranks_with_different_options_are_rejected(self):
        def ranks(*options):
            started = self.start_ranks(*(["--steps", 2, *words] for words in options))
            return [(one.communicate(timeout=120)[1], one.returncode) for one in started]

        for text, code in ranks(["--learning-rate", 0.1], ["--learning-rate", 0.2, "--output", "elsewhere"]):
            self.assertEqual(code, 2, text)
            self.assertEqual(text, "penstock: the ranks have different options.\n  learning-rate: 0.2 on rank 1, 0.1 on rank 0\n"
                             "  Hint: start all ranks with the same command line and configuration file.\n")
        for text, code in ranks(["--checkpoint", "kept", "--seed", 3], []):
            self.assertEqual(code, 2, text)
            self.assertIn("\n  checkpoint: not given on rank 1, given on rank 0\n  seed: 0 on rank 1, 3 on rank 0\n", text)
        for text, code in ranks(["--memory", "1GB"], []):
            self.assertEqual(code, 2, text)
            self.assertIn("\n  memory: not given on rank 1, 1GB on rank 0\n", text)
        (self.folder / "a").write_text("the water turns the wheel. " * 40)
        (self.folder / "b").write_text("the wheel turns the water. " * 40)
        size = ["--length", 8]
        for text, code in ranks(["--data", "a", *size], ["--data", "b", *size]):
            self.assertEqual(code, 2, text)
            self.assertRegex(text, r"data \(names, sizes or checksum\): 1080 bytes, CRC-32 \d+ on rank 1, 1080 bytes, CRC-32 ")
        (self.folder / "a.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
        (self.folder / "b.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
        for text, code in ranks(["--csv", "a.csv"], ["--csv", "b.csv"]):
            self.assertEqual(code, 2, text)
            self.assertRegex(text, r"\n  csv \(checksum\): \d+ on rank 1, \d+ on rank 0\n")
        for text, code in ranks([], ["--ranks", 4]):
            self.assertEqual(code, 2, text)
            self.assertIn("\n  ranks: 4 on rank 1, 2 on rank 0\n", text)
        # A number may be written in several ways, and a default may be given.
        for text, code in ranks(["--beta2", ".980", "--weight-decay", "1e-2"], ["--ranks", 2, "--microbatches", 8]):
            self.assertEqual(code, 0, text)
        shutil.rmtree(self.folder / "penstock-train")
        # Paths may differ between ranks.
        (self.folder / "b").write_text((self.folder / "a").read_text())
        for text, code in ranks(["--data", "a", *size, "--output", "one"], ["--data", "b", *size, "--output", "two"]):
            self.assertEqual(code, 0, text)

    def test_launch_starts_ranks_and_reports_their_exit_codes(self):
        self.penstock("launch", "--processes", 2, "train", *SMALL, "--steps", 2, "--output", "run")
        self.assertEqual(list(self.losses()), [1, 2])
        result = self.penstock("launch", "--processes", 3, "train", *SMALL, "--steps", 2, code=2)
        self.assertIn("found 3 processes, expected 2: 2 ranks for each of 1 replicas.", result.stderr)
        self.assertIn("penstock launch: rank 0 exited with 2\n", result.stderr)

    def test_torchrun_starts_ranks(self):
        torchrun = [REFERENCE_PYTHON, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", PENSTOCK, "train",
                    *map(str, SMALL), "--steps", "2", "--output", "run"]
        result = subprocess.run(torchrun, cwd=self.folder, capture_output=True, text=True, timeout=300)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(list(self.losses()), [1, 2])
        self.train(*SMALL, "--steps", 2, output="threads")
        self.assertEqual(self.losses(), self.losses("threads"))

    def test_an_error_of_a_rank_is_printed_once(self):
        result = self.penstock("train", *SMALL, "--transport", "gloo", "--timeout", 0.001, code=2)
        self.assertEqual(result.stderr.count("penstock: "), 1, result.stderr)


if __name__ == "__main__":
    unittest.main()
