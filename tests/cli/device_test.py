"""Tests of --device on the simulated accelerator. PENSTOCK names the command, PENSTOCK_ZOO the directory that zoo.py has written,
PENSTOCK_PROGRAMS that of models.py, and REFERENCE_PYTHON a Python with torch."""

import json
import os
import shutil
import socket
import subprocess
import unittest

from command_case import PENSTOCK
from safetensors_files import read_tensors
from train_case import PROGRAMS, Case

ZOO = os.path.abspath(os.environ["PENSTOCK_ZOO"])
# Few seconds for each run.
QUICK = ["--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2, "--warmup", 2]

# Models of the zoo: convolutions and running statistics, recurrent networks, regions of autocast, constants, written buffers,
# operators in place, shapes that depend on data, dropout.
MODELS = ["resnet", "lstm", "autocast", "scalars", "assigned_buffer", "inplace", "moe_dropless", "encoder_decoder"]


class Devices(Case):
    def test_refuses_devices_that_do_not_exist_before_anything_runs(self):
        for command in (["train", "--output", "run"], ["check", ZOO + "/gpt.pt2"]):
            for device, message in (
                ("gpu", "penstock: there is no device type 'gpu'.\n  Hint: devices are cpu, cuda, cuda:0,1, xpu and sim.\n"),
                ("cuda:0,1", "penstock: this build of libtorch does not support cuda devices.\n"),
                ("sim:0,4", "penstock: there are 4 devices of type sim, numbered from 0; found sim:4.\n"),
                ("sim:a", "penstock: 'sim:a': 'a' is not the index of a device.\n"),
            ):
                self.assertIn(message, self.refuses(*command, "--device", device, message="penstock: "))
        self.assertFalse((self.folder / "run").exists())

    def test_names_the_library_of_the_simulated_device_if_it_is_missing(self):
        result = self.penstock("train", "--device", "sim", code=2, environment={"PENSTOCK_SIM_LIBRARY": "/nowhere/libsim.so"})
        self.assertEqual(result.stderr, "penstock: PENSTOCK_SIM_LIBRARY names no file: '/nowhere/libsim.so'.\n"
                         "  Hint: set it to the path of libpenstock_sim.so, or unset it.\n")

    def test_trains_with_the_losses_of_the_cpu(self):
        text = self.train(*QUICK, "--steps", 5)
        self.assertIn("2 stages on 2 ranks (threads), 1F1B", text)
        expected = self.losses()
        for device in ("sim:0", "sim:2,0"):
            text = self.train(*QUICK, "--steps", 5, "--device", device, output="sim")
            self.assertIn(f"2 stages on 2 ranks (threads, {device}), 1F1B", text)
            self.assertRegex(text, r"memory       rank 0: .* measured, not predicted on devices\n")
            self.assertEqual(self.losses("sim"), expected)

    def test_draws_a_timeline_of_the_device_times(self):
        self.train(*QUICK, "--steps", 2, "--device", "sim:0,1")
        timelines = self.timelines()
        self.assertEqual(set(timelines), {"measured", "simulated"})
        for rank in timelines["measured"]:
            # A stream runs one action after the other, which the host's own times need not show.
            bars = sorted(zip(rank["start"], rank["end"]))
            self.assertEqual(len(bars), 16)
            for (_, end), (start, _) in zip(bars, bars[1:]):
                self.assertLessEqual(end, start + 1e-6)
            self.assertGreater(min(rank["memory"]["bytes"]), 0)
        # The cost model knows no activations of devices.
        for rank in timelines["simulated"]:
            self.assertNotIn("memory", rank)

    def test_resumes_on_another_device(self):
        self.train(*QUICK, "--steps", 6, output="whole")
        expected = self.losses("whole")
        for first, second in (("cpu", "sim:0,1"), ("sim", "cpu")):
            words = [*QUICK, "--checkpoint", f"kept-{second}", "--output", f"run-{second}"]
            # The rate falls along a cosine to the last step of the run.
            self.penstock("train", *words, "--steps", 6, "--device", first, "--checkpoint-every", 3)
            shutil.rmtree(self.folder / f"kept-{second}/step-00000006")
            self.assertIn("resuming after step 3", self.penstock("train", *words, "--steps", 6, "--resume", "--device", second,
                                                                 "--checkpoint-every", 3).stdout)
            self.assertEqual(self.losses(f"run-{second}"), expected)

    def test_scales_the_loss_of_float16(self):
        text = self.train(*QUICK, "--steps", 4, "--device", "sim:0,1", "--dtype", "float16", "--checkpoint", "kept")
        self.assertIn("step 4/4", text)
        lines = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([line["loss_scale"] for line in lines if "loss" in line], [65536] * 4)
        manifest = json.loads((self.folder / "kept/step-00000004/manifest.json").read_text())
        self.assertEqual(manifest["grad_scaler"], {"scale": 65536, "growth_tracker": 4})

    def test_trains_process_ranks_each_on_its_device(self):
        self.train(*QUICK, "--steps", 3)
        expected = self.losses()
        self.train(*QUICK, "--steps", 3, "--device", "sim", "--transport", "gloo", "--ranks", 2, output="gloo")
        self.assertEqual(self.losses("gloo"), expected)

    def test_refuses_ranks_on_devices_of_other_types(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank, device in enumerate(("sim:0", "cpu")):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port)}
            words = ["train", *QUICK, "--steps", 2, "--output", f"run-{rank}", "--device", device]
            ranks.append(subprocess.Popen([PENSTOCK, *map(str, words)], cwd=self.folder, env=environment,
                                          stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
        for rank in ranks:
            _, text = rank.communicate(timeout=60)
            self.assertEqual(rank.returncode, 2, text)
            self.assertIn("device (type)", text)
            self.assertIn("sim", text)

    def test_refuses_a_limit_of_memory(self):
        message = ("--memory predicts the memory of ranks on the CPU, and not of devices; found --device sim:0.\n"
                   "  Hint: leave --memory out; --dry-run measures two steps.")
        self.refuses("train", "--device", "sim:0", "--memory", "1GiB", message=message)

    def test_trains_and_evaluates_an_exported_model(self):
        self.write_batches()
        words = [PROGRAMS + "/pair.pt2", "--data", "data", "--loss", "mse", "--stages", 2, "--microbatches", 4]
        self.train(*words, "--steps", 4)
        expected = self.losses()
        self.train(*words, "--steps", 4, "--device", "sim:0,1", output="sim")
        self.assertEqual(self.losses("sim"), expected)
        evaluation = ["eval", *words[:5], "--stages", 2]
        text = self.answers(*evaluation).split(" rows/s")[0].split(", ")[0]
        self.assertEqual(self.answers(*evaluation, "--device", "sim:1,0").split(" rows/s")[0].split(", ")[0], text)

    def test_checks_exported_models(self):
        for name in MODELS:
            with self.subTest(model=name):
                text = self.answers("check", f"{ZOO}/{name}.pt2", "--stages", 2, "--device", "sim:0,1")
                self.assertIn("(threads, sim:0,1)", text)
                self.assertIn("bitwise identical to one process", text)
        # The tied embedding sums its gradients in another order, as on the CPU.
        for words in (["--stages", 2], ["--stages", 2, "--recompute", "stages"],
                      ["--schedule", "ZBVZeroBubble", "--ranks", 2, "--stages", 4, "--recompute", "all"],
                      ["--stages", 2, "--transport", "gloo"]):
            with self.subTest(words=words):
                text = self.answers("check", ZOO + "/gpt.pt2", *words, "--device", "sim")
                self.assertIn("gradients: 47, of which 45 are bitwise identical", text)
                self.assertIn("equal to one process up to rounding", text)

    def test_runs_an_exported_model_with_the_outputs_of_the_cpu(self):
        self.write_batches()
        words = ["run", PROGRAMS + "/pair.pt2", "--inputs", "data/eval-0.safetensors", "--stages", 2]
        self.answers(*words, "--output", "cpu.safetensors")
        self.answers(*words, "--output", "sim.safetensors", "--device", "sim")
        self.assertEqual(read_tensors(self.path("sim.safetensors")), read_tensors(self.path("cpu.safetensors")))


if __name__ == "__main__":
    unittest.main()
