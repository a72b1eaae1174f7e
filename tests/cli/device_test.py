"""Tests of --device on the simulated accelerator. PENSTOCK names the command, PENSTOCK_ZOO the directory that zoo.py has written,
PENSTOCK_PROGRAMS that of models.py, and REFERENCE_PYTHON a Python with torch."""

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import unittest

from command_case import PENSTOCK
from safetensors_files import read_tensors
from train_case import PROGRAMS, Case, children_of

ZOO = os.path.abspath(os.environ["PENSTOCK_ZOO"])
# Few seconds for each run.
QUICK = ["--digits", 1, "--rows", 8, "--layers", 2, "--width", 16, "--heads", 2, "--warmup", 2]

# Lines that the command prints with process ranks on devices.
DIRECT = "penstock: tensors on devices are sent from device to device.\n"
STAGED = "penstock: tensors on devices are staged in CPU memory.\n"
SHARED = "penstock: tensors on devices are staged in CPU memory, as ranks 0 and 1 have the same device.\n"
# Values of --device-transport with the line that follows, where each rank has a device of its own.
DEVICE_TRANSPORTS = {"auto": DIRECT, "direct": DIRECT, "staged": STAGED}

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

    def test_writes_checkpoints_beside_training(self):
        # Thread ranks, and process ranks with shards.
        for words in (["--keep", 2], ["--keep", 2, "--transport", "gloo", "--ranks", 2, "--data-parallel", 2, "--shard",
                                         "--microbatches", 4]):
            with self.subTest(words=words):
                words = [*QUICK, "--steps", 7, "--checkpoint-every", 2, "--eval-every", 3, *words]
                self.train(*words, "--checkpoint", "cpu")
                expected = self.losses()
                text = self.train(*words, "--checkpoint", "sim", "--device", "sim", output="sim-run")
                self.assertEqual(re.findall(r"step (\d): checkpoint sim/step-0000000\1\n", text), ["2", "4", "6", "7"])
                self.assertEqual(self.losses("sim-run"), expected)
                self.assertEqual(self.names_in("sim"), self.names_in("cpu"))
                for name in ("step-00000006", "step-00000007"):
                    files = self.names_in(f"cpu/{name}")
                    self.assertEqual(self.names_in(f"sim/{name}"), files)
                    for file in files:
                        if file == "manifest.json":
                            continue
                        self.assertEqual((self.folder / "sim" / name / file).read_bytes(),
                                         (self.folder / "cpu" / name / file).read_bytes(), file)

    def test_an_interrupted_run_leaves_a_complete_checkpoint(self):
        for transport in ("threads", "gloo"):
            with self.subTest(transport=transport):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                words = [*QUICK, "--checkpoint", "kept", "--checkpoint-every", 3, "--device", "sim:0,1", "--transport", transport]
                process = self.begun([*words, "--steps", 100000, "--overwrite"], after=4)
                process.send_signal(signal.SIGTERM)
                text, _ = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 143, text)
                done = int(re.search(r"stopped after step (\d+); continue with --resume\.\n", text)[1])
                self.assertIn(f"step {done}: checkpoint kept/step-{done:08}\n", text)
                self.assertEqual(self.names_in("kept")[-1], f"step-{done:08}")
                self.assertEqual([name for name in self.names_in("kept") if name.startswith(".unfinished")], [])
                self.assertIn(f"nothing to do: step {done} of {done} is done.", self.train(*words, "--steps", done, "--resume"))

    def test_a_run_that_is_killed_beside_a_checkpoint_resumes_to_the_same_losses(self):
        common = [*QUICK, "--steps", 40, "--device", "sim:0,1"]
        self.train(*common, output="whole")
        expected = self.losses("whole")
        words = [*common, "--checkpoint", "kept", "--checkpoint-every", 1, "--resume"]
        for steps in (3, 12, 25):
            process = self.begun(words, after=steps)
            process.kill()
            process.communicate(timeout=60)
            for checkpoint in (self.folder / "kept").glob("step-*"):
                self.assertTrue((checkpoint / "manifest.json").exists())
        self.train(*words)
        self.assertEqual(self.losses(), expected)
        self.assertEqual([name for name in self.names_in("kept") if name.startswith(".unfinished")], [])

    def test_a_disk_that_becomes_full_leaves_no_part_of_a_checkpoint(self):
        words = [*QUICK, "--steps", 100000, "--checkpoint", "kept", "--checkpoint-every", 4, "--device", "sim:0,1"]
        for transport in ("threads", "gloo"):
            with self.subTest(transport=transport):
                shutil.rmtree(self.folder / "run", ignore_errors=True)
                shutil.rmtree(self.folder / "kept", ignore_errors=True)
                process = self.begun([*words, "--transport", transport], after=2, stderr=subprocess.PIPE)
                # A limit on the size of files acts like a full disk.
                for rank in [process.pid, *children_of(process.pid)]:
                    resource.prlimit(rank, resource.RLIMIT_FSIZE, (8192, 8192))
                _, error = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 2, error)
                self.assertRegex(error, r"kept/\.unfinished-step-\d+/\w+-\d\.safetensors: could not be written: File too large")
                self.assertEqual(list((self.folder / "kept").glob(".unfinished*")), [])

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
        for transport, line in DEVICE_TRANSPORTS.items():
            with self.subTest(transport=transport):
                result = self.penstock("train", *QUICK, "--steps", 3, "--device", "sim", "--transport", "gloo", "--ranks", 2,
                                       "--device-transport", transport, "--output", transport)
                self.assertEqual(result.stderr, line)
                self.assertEqual(self.losses(transport), expected)

    def test_trains_replicas_and_shards_with_messages_from_device_to_device(self):
        words = [*QUICK[:2], "--rows", 16, *QUICK[4:], "--steps", 3, "--data-parallel", 2, "--ranks", 2]
        for options in ([], ["--shard"]):
            self.train(*words, *options)
            expected = self.losses()
            with self.subTest(options=options):
                result = self.penstock("train", *words, *options, "--device", "sim", "--transport", "gloo",
                                       "--device-transport", "direct", "--output", "direct", "--overwrite")
                self.assertEqual(result.stderr, DIRECT)
                self.assertEqual(self.losses("direct"), expected)

    def test_samples_text_and_resumes_with_messages_from_device_to_device(self):
        (self.folder / "text").write_text("the water turns the wheel and the wheel turns the mill. " * 50)
        words = ["--data", "text", *QUICK[2:], "--length", 16, "--steps", 4, "--checkpoint-every", 2]
        expected = self.train(*words, "--checkpoint", "cpu").partition("Sample:")[2]
        self.assertNotEqual(expected, "")
        direct = [*words, "--checkpoint", "direct", "--device", "sim", "--transport", "gloo", "--ranks", 2]
        text = self.train(*direct, output="direct")
        self.assertEqual(text.partition("Sample:")[2], expected)
        self.assertEqual(self.losses("direct"), self.losses())
        shutil.rmtree(self.folder / "direct/step-00000004")
        text = self.train(*direct, "--resume", output="direct")
        self.assertIn("resuming after step 2", text)
        self.assertEqual(text.partition("Sample:")[2], expected)
        words = ["generate", "cpu", "the ", "--bytes", 20]
        self.assertEqual(self.answers(*words, "--device", "sim:1,0"), self.answers(*words))

    def test_launches_ranks_with_messages_from_device_to_device(self):
        self.train(*QUICK, "--steps", 2)
        result = self.penstock("launch", "--processes", 2, "train", *QUICK, "--steps", 2, "--ranks", 2, "--device", "sim",
                               "--device-transport", "direct", "--output", "launched")
        self.assertEqual(result.stderr, DIRECT)
        self.assertEqual(self.losses("launched"), self.losses())

    def test_stages_messages_of_ranks_that_share_a_device(self):
        words = ["train", *QUICK, "--steps", 2, "--device", "sim:0", "--transport", "gloo", "--ranks", 2]
        self.assertEqual(self.penstock(*words).stderr, SHARED)
        message = ("penstock: tensors cannot be sent from device to device: ranks 0 and 1 have the same device.\n"
                   "  Hint: give each rank a device of its own, or stage tensors in CPU memory (--device-transport staged).\n")
        result = self.penstock(*words, "--device-transport", "direct", "--overwrite", code=2)
        self.assertEqual(result.stderr, message)

    def test_refuses_direct_messages_where_there_are_none(self):
        for command in (["train", "--output", "run"], ["check", ZOO + "/gpt.pt2", "--stages", 2]):
            for words, message in (
                (["--transport", "gloo"],
                 "penstock: --device-transport direct sends tensors from device to device; found ranks on the CPU.\n"
                 "  Hint: choose devices with --device, or leave --device-transport out.\n"),
                (["--device", "sim"],
                 "penstock: --device-transport direct is for process ranks; found thread ranks.\n"
                 "  Hint: start process ranks with --transport gloo, or leave --device-transport out: thread ranks never send "
                 "tensors through CPU memory.\n"),
            ):
                self.assertEqual(self.refuses(*command, *words, "--device-transport", "direct", message=message), message)
        self.refuses("check", ZOO + "/gpt.pt2", "--device-transport", "fast", message="--device-transport: ")
        self.assertFalse((self.folder / "run").exists())

    def train_by_hand(self, *options):
        """Starts a rank with each of the options, and returns what they print as errors."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank, words in enumerate(options):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(options)), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port)}
            words = ["train", *QUICK, "--steps", 2, "--output", f"run-{rank}", *words]
            ranks.append(subprocess.Popen([PENSTOCK, *map(str, words)], cwd=self.folder, env=environment,
                                          stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True))
        errors = []
        for rank in ranks:
            _, text = rank.communicate(timeout=60)
            self.assertEqual(rank.returncode, 2, text)
            errors.append(text)
        return errors

    def test_refuses_ranks_on_devices_of_other_types(self):
        for text in self.train_by_hand(["--device", "sim:0"], ["--device", "cpu"]):
            self.assertIn("device (type)", text)
            self.assertIn("sim", text)

    def test_refuses_ranks_with_other_device_transports(self):
        words = ["--device", "sim", "--device-transport"]
        for text in self.train_by_hand([*words, "direct"], [*words, "staged"]):
            self.assertIn("\n  device_transport: staged on rank 1, direct on rank 0\n", text)

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
        for transport, line in DEVICE_TRANSPORTS.items():
            with self.subTest(transport=transport):
                result = self.penstock(*evaluation, "--device", "sim", "--transport", "gloo", "--device-transport", transport)
                self.assertEqual(result.stderr, line)
                self.assertEqual(result.stdout.split(" rows/s")[0].split(", ")[0], text)

    def test_checks_exported_models(self):
        for name in MODELS:
            with self.subTest(model=name):
                text = self.answers("check", f"{ZOO}/{name}.pt2", "--stages", 2, "--device", "sim:0,1")
                self.assertIn("(threads, sim:0,1)", text)
                self.assertIn("bitwise identical to one process", text)
        # The tied embedding sums its gradients in another order, as on the CPU.
        for words in (["--stages", 2], ["--stages", 2, "--recompute", "stages"],
                      ["--schedule", "ZBVZeroBubble", "--ranks", 2, "--stages", 4, "--recompute", "all"]):
            with self.subTest(words=words):
                self.assert_equal_to_one_process(self.answers("check", ZOO + "/gpt.pt2", *words, "--device", "sim"))

    def assert_equal_to_one_process(self, text):
        self.assertIn("gradients: 47, of which 45 are bitwise identical", text)
        self.assertIn("equal to one process up to rounding", text)

    def test_checks_process_ranks(self):
        for words in (["--stages", 2], ["--schedule", "ZBVZeroBubble", "--ranks", 2, "--stages", 4],
                      ["--schedule", "Interleaved1F1B", "--ranks", 2, "--stages", 4]):
            for transport, line in DEVICE_TRANSPORTS.items():
                if transport == "auto" and words[0] == "--schedule":
                    continue
                with self.subTest(words=words, transport=transport):
                    result = self.penstock("check", ZOO + "/gpt.pt2", *words, "--device", "sim", "--transport", "gloo",
                                           "--device-transport", transport)
                    self.assertEqual(result.stderr, line)
                    self.assert_equal_to_one_process(result.stdout)

    def test_runs_an_exported_model_with_the_outputs_of_the_cpu(self):
        self.write_batches()
        words = ["run", PROGRAMS + "/pair.pt2", "--inputs", "data/eval-0.safetensors", "--stages", 2]
        self.answers(*words, "--output", "cpu.safetensors")
        self.answers(*words, "--output", "sim.safetensors", "--device", "sim")
        self.assertEqual(read_tensors(self.path("sim.safetensors")), read_tensors(self.path("cpu.safetensors")))
        for transport, line in DEVICE_TRANSPORTS.items():
            with self.subTest(transport=transport):
                result = self.penstock(*words, "--output", "sim.safetensors", "--device", "sim", "--transport", "gloo",
                                       "--device-transport", transport)
                self.assertEqual(result.stderr, line)
                self.assertEqual(read_tensors(self.path("sim.safetensors")), read_tensors(self.path("cpu.safetensors")))


if __name__ == "__main__":
    unittest.main()
