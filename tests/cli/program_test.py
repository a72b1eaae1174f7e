"""Tests of penstock split, check and run. PENSTOCK names the command, PENSTOCK_ZOO the directory that zoo.py has written, and
PENSTOCK_PROGRAMS that of models.py. With PENSTOCK_GRID=whole, every model of the zoo runs on process ranks with every
schedule."""

import fcntl
import json
import os
import pathlib
import re
import struct
import subprocess
import time
import unittest
import xml.etree.ElementTree

from command_case import PENSTOCK, CommandCase
from safetensors_files import read_tensors

ZOO = os.path.abspath(os.environ["PENSTOCK_ZOO"])
PROGRAMS = os.path.abspath(os.environ["PENSTOCK_PROGRAMS"])
WHOLE_GRID = os.environ.get("PENSTOCK_GRID") == "whole"

# Schedule, number of stages, number of ranks.
SCHEDULES = [
    ("1F1B", 1, 1),
    ("1F1B", 2, 2),
    ("1F1B", 3, 3),
    ("1F1B", 4, 4),
    ("Interleaved1F1B", 2, 1),
    ("Interleaved1F1B", 4, 2),
    ("ZBVZeroBubble", 2, 1),
    ("ZBVZeroBubble", 4, 2),
    ("DualPipeV", 2, 1),
    ("DualPipeV", 4, 2),
]


class Case(CommandCase):
    def setUp(self):
        super().setUp()
        # Temporary files that the command leaves behind would be found here.
        self.temporary = self.path("tmp")
        os.mkdir(self.temporary)

    def penstock(self, *words, code=0, environment=None):
        result = super().penstock(*words, code=code, environment={"TMPDIR": self.temporary, **(environment or {})})
        self.assertEqual(os.listdir(self.temporary), [], words)
        return result

    def model(self, name):
        return os.path.join(ZOO, name + ".pt2")


class Usage(Case):
    def test_help_names_the_commands_and_their_options(self):
        for command in ("split", "check", "run", "eval", "export"):
            self.assertIn(f"  {command} ", self.answers("--help"))
            self.assertIn(f"Usage: penstock {command}", self.answers(command, "--help"))
        self.assertIn("--tolerance T", self.answers("check", "--help"))

    def test_schedules_need_no_libtorch(self):
        for words, needed in ((("schedule", "list"), False), (("split", self.model("mlp")), True)):
            loaded = subprocess.run(
                [PENSTOCK, *words], capture_output=True, text=True, env={**os.environ, "LD_DEBUG": "files"}
            ).stderr
            self.assertEqual("libtorch" in loaded, needed, words)

    def test_usage_errors(self):
        self.refuses("split", message="MODEL.pt2 is required")
        self.refuses("splt", message="did you mean split?")
        self.refuses("check", self.model("mlp"), "--transport", "mpi", message="'mpi' is none of threads, gloo")
        self.refuses("check", self.model("mlp"), "--schedule", "1F2B", message="1F1B")
        self.refuses("check", self.model("mlp"), "--ranks", "0", message="should be a whole number from 1 on")
        self.refuses("check", self.model("mlp"), "--seed", "-1", message="'-1' should be a whole number from 0 to 2^64 - 1")
        self.refuses("check", self.model("mlp"), "--timeout", "0", message="'0' should be a number above 0")
        self.refuses("run", self.model("mlp"), message="--inputs is required")

    def test_files_that_are_not_models(self):
        self.refuses("split", self.path("none.pt2"), message="none.pt2: No such file or directory.")
        self.refuses("split", self.folder, message="is not a regular file.")
        with open(self.path("text.pt2"), "w") as file:
            file.write("not a model")
        self.refuses("split", self.path("text.pt2"), message="Hint: write the .pt2 with torch.export.save.")


class Split(Case):
    def test_shows_stages_and_boundary_values(self):
        text = self.answers("split", self.model("gpt"), "--at", "blocks.1", "blocks.2")
        self.assertRegex(text, r"gpt\.pt2: 3 stages\n  stage 0: embedding, position, dropout, blocks\.0\n")
        self.assertRegex(text, r"    -> stage 1: add_\d float32\[2, 6, 16\]\n  stage 1: blocks\.1\n")
        self.assertIn("  shared: embedding.weight by stages 0, 2\n", text)

    def test_cuts_after_a_module(self):
        self.assertEqual(
            self.answers("split", self.model("gpt"), "--at", "blocks.0:end"),
            self.answers("split", self.model("gpt"), "--at", "blocks.1"),
        )

    def test_json_has_stages_and_boundary_values(self):
        read = json.loads(self.answers("split", self.model("gpt"), "--at", "blocks.1", "--json"))
        self.assertEqual(read["version"], 1)
        self.assertEqual(len(read["stages"]), 2)
        self.assertEqual([(one["from"], one["to"]) for one in read["boundary_values"]], [(0, 1)])
        self.assertEqual(read["shared"], [{"name": "embedding.weight", "stages": [0, 1]}])

    def test_a_picture_is_written_completely_or_not_at_all(self):
        self.assertEqual(self.answers("split", self.model("unet"), "--stages", 4, "--format", "svg", "-o", self.path("a.svg")), "")
        picture = xml.etree.ElementTree.parse(self.path("a.svg")).getroot()
        self.assertEqual(len([one for one in picture.iter() if one.get("class") == "box"]), 4)
        self.refuses("split", self.model("unet"), "--at", "none", "-o", self.path("b.svg"), message="there is no module 'none'")
        self.assertFalse(os.path.exists(self.path("b.svg")))

    def test_marks_are_cuts(self):
        self.assertIn("marks.pt2: 4 stages\n", self.answers("split", self.model("marks")))

    def test_rejects_cuts_that_are_impossible(self):
        self.refuses("split", self.model("gpt"), "--at", "block.1", message="Hint: did you mean blocks.1?")
        self.refuses("split", self.model("gpt"), "--at", "blocks", message="name one of those, such as blocks.0")
        self.refuses("split", self.model("mlp"), "--stages", 1000, message="cannot be split into 1000 stages: it has")
        self.refuses("split", self.model("mlp"), "--stages", 2, "--at", "x", message="excludes")


class Check(Case):
    def test_reports_bitwise_identity(self):
        text = self.answers("check", self.model("mlp"), "--stages", 2)
        self.assertRegex(
            text,
            r"^.*mlp\.pt2: 2 stages on 2 ranks \(threads\), 1F1B, 4 microbatches, training\n"
            r"  outputs: 1, all bitwise identical\n  gradients: \d+, all bitwise identical\nbitwise identical to one process\n$",
        )

    def test_can_leave_out_the_comparison(self):
        text = self.answers("check", self.model("moe"), "--stages", 2, "--transport", "gloo", "--no-reference")
        self.assertRegex(text, r"^\S+moe\.pt2: 2 stages on 2 ranks \(gloo\), 1F1B, 4 microbatches, training\nnot compared with one process\n$")
        text = self.answers("check", self.model("moe"), "--stages", 2, "--transport", "gloo")
        self.assertRegex(text, r"^reference: one process, with [\d.]+ kB of weights and as much of gradients; --no-reference leaves it out\n")

    def test_recomputation_changes_no_bit(self):
        for words in (["all"], ["stages"], ["layers.0", "head"], ["none"]):
            with self.subTest(words=words):
                text = self.answers("check", self.model("moe"), "--stages", 2, "--schedule", "GPipe", "--recompute", *words)
                self.assertIn("\nbitwise identical to one process\n", text)
        # A parameter that the forward writes to, and whose values the backward needs.
        text = self.answers("check", os.path.join(PROGRAMS, "written_factor.pt2"), "--schedule", "GPipe", "--recompute", "stages")
        self.assertIn("\nbitwise identical to one process\n", text)
        self.refuses("check", self.model("moe"), "--stages", 2, "--recompute", "layers.9",
                     message="there is no module 'layers.9' to recompute.\n  Hint: did you mean layers.0?")
        self.refuses("check", self.model("unet"), "--stages", 2, "--recompute", "all", message="--recompute all finds no blocks in lists")
        self.refuses("check", self.model("moe"), "--stages", 2, "--recompute", "all", "layers.0",
                     message="--recompute all layers.0: 'all' stands alone.\n  Hint: give MODEL.pt2 before the options")
        self.refuses("run", self.model("moe"), "--inputs", "x", "--output", "y", "--recompute", "all", message="--recompute")

    def test_shared_parameters_are_equal_up_to_rounding(self):
        words = ("check", self.model("gpt"), "--stages", 2, "--eval", "--inputs", os.path.join(ZOO, "gpt.inputs.safetensors"))
        text = self.answers(*words)
        self.assertIn("1F1B, 4 microbatches, evaluation\n", text)
        self.assertRegex(text, r"the largest difference is \S+ in grad\.\S+ \(\S+ relative to its own scale, \S+ relative to the largest of all gradients\)\n")
        self.assertIn("equal to one process up to rounding\n", text)
        self.assertIn("DIFFERENT from one process\n", self.answers(*words, "--tolerance", 0, code=1))
        self.assertNotIn("note:", text)

    def test_reports_that_products_depend_on_alignment(self):
        words = ("check", self.model("gpt"), "--stages", 2, "--eval", "--inputs", os.path.join(ZOO, "gpt.inputs.safetensors"))
        result = self.penstock(*words, environment={"MKL_CBWR": "AUTO"})
        self.assertRegex(
            result.stdout,
            r"\nnote: Products may differ in their last bits with the alignment of tensors in memory: MKL_CBWR=AUTO does not ask MKL "
            r"for strict reproducibility\.\n  Hint: unset MKL_CBWR, or set MKL_CBWR=AUTO,STRICT\.\n$",
        )

    def test_dumps_what_eager_pytorch_computes(self):
        for name in ("gpt", "unet", "kwargs_none", "gpt_dynamic"):
            with open(os.path.join(ZOO, name + ".json")) as file:
                entry = json.load(file)
            mode = ("--eval",) if entry["mode"] == "eval" else ()
            self.answers("check", self.model(name), "--stages", 3, *mode, "--microbatches", entry["microbatches"],
                         "--inputs", os.path.join(ZOO, name + ".inputs.safetensors"), "--dump", self.path("dump.safetensors"))
            found = read_tensors(self.path("dump.safetensors"))
            expected = read_tensors(os.path.join(ZOO, name + ".expected.safetensors"))
            wanted = {one for one in expected if not one.startswith("buffer.")}
            self.assertEqual(set(found), wanted)
            for one in wanted:
                if isinstance(expected[one], bytes):
                    self.assertEqual(expected[one], found[one])
                    continue
                scale = max([1.0, *map(abs, expected[one])])
                worst = max([0, *(abs(a - b) for a, b in zip(expected[one], found[one], strict=True))])
                self.assertLessEqual(worst, entry["tolerance"] * scale, (name, one))

    def test_a_schedule_from_a_file(self):
        subprocess.run([PENSTOCK, "schedule", "export", "GPipe", "--ranks", "2", "--microbatches", "3", "-o", self.path("s.csv")], check=True)
        text = self.answers("check", self.model("mlp"), "--stages", 2, "--csv", self.path("s.csv"))
        self.assertIn("s.csv, 3 microbatches", text)
        self.refuses("check", self.model("mlp"), "--stages", 3, "--csv", self.path("s.csv"),
                     message="s.csv: found 2 stages, expected 3, as the model is cut.")

    def test_a_schedule_that_deadlocks_is_refused_with_its_places_in_the_file(self):
        pathlib.Path(self.path("stuck.csv")).write_text("# Stuck.\n0F0,0B0,0F1,0B1\n\n1F1,1F0,1B0,1B1\n")
        self.refuses("check", self.model("mlp"), "--stages", 2, "--csv", self.path("stuck.csv"),
                     message="stuck.csv:2:5: 0B0 waits for 1B0 on rank 1\n  rank 1, " + self.path("stuck.csv") + ":4:1: 1F1 waits for 0F1 on rank 0")

    def test_models_that_mutate_their_state_or_inputs(self):
        for name in ("written_parameter", "counted_at_the_end", "plus_equals", "expanded_buffer", "sparse", "writes_input"):
            with self.subTest(name=name):
                self.assertIn("bitwise identical to one process\n", self.answers("check", os.path.join(PROGRAMS, f"{name}.pt2")))

    def test_a_dump_that_cannot_be_written_is_reported_before_the_run(self):
        self.refuses("check", self.model("mlp"), "--dump", self.folder, message="is a directory; give the path of a file.")
        place = self.path("none/dump.safetensors")
        self.refuses("check", self.model("mlp"), "--dump", place,
                     message=f"{place}: cannot be written: there is no directory {self.path('none')}.")

    def test_ranks_that_do_not_fit(self):
        self.refuses("check", self.model("mlp"), "--stages", 3, "--ranks", 2,
                     message="1F1B has 1 stage per rank, so 3 stages cannot be placed on 2 ranks")
        self.refuses("check", self.model("mlp"), "--stages", 3, "--schedule", "ZBVZeroBubble",
                     message="ZBVZeroBubble has 2 stages per rank, so 3 stages cannot be placed on any number of ranks")

    def test_ranks_determine_the_number_of_stages(self):
        self.assertIn(": 4 stages on 2 ranks", self.answers("check", self.model("mlp"), "--ranks", 2, "--schedule", "ZBVZeroBubble"))

    def test_inputs_that_do_not_fit(self):
        self.refuses("check", self.model("mlp"), "--inputs", os.path.join(ZOO, "gpt.inputs.safetensors"), message="args.0")
        self.refuses("check", self.model("gpt"), "--inputs", os.path.join(ZOO, "gpt.expected.safetensors"), message="is missing")

    def test_dropout_is_the_same_on_every_cut(self):
        dumps = []
        for stages, schedule, seed in ((1, "1F1B", 3), (3, "1F1B", 3), (2, "ZBVZeroBubble", 3), (1, "1F1B", 4)):
            self.answers("check", self.model("gpt"), "--stages", stages, "--schedule", schedule, "--seed", seed,
                         "--microbatches", 4, "--inputs", os.path.join(ZOO, "gpt.inputs.safetensors"),
                         "--dump", self.path("dump.safetensors"))
            dumps.append(read_tensors(self.path("dump.safetensors"))["output.0"])
        self.assertEqual(dumps[0], dumps[1])
        self.assertEqual(dumps[0], dumps[2])
        self.assertNotEqual(dumps[0], dumps[3])


class OnProcesses(Case):
    def check(self, name, schedule, stages, ranks):
        with open(os.path.join(ZOO, name + ".json")) as file:
            entry = json.load(file)
        text = self.answers("check", self.model(name), "--stages", stages, "--ranks", ranks, "--schedule", schedule,
                            "--transport", "gloo", "--microbatches", entry["microbatches"],
                            "--inputs", os.path.join(ZOO, name + ".inputs.safetensors"))
        self.assertIn(f"{stages} stage", text)
        # Only gradients of shared parameters are summed in another order.
        if not json.loads(self.answers("split", self.model(name), "--stages", stages, "--json"))["shared"]:
            self.assertIn("bitwise identical to one process\n", text, (name, schedule))

    def test_models_of_the_zoo(self):
        with open(os.path.join(ZOO, "zoo.json")) as file:
            names = json.load(file)
        for i, name in enumerate(names):
            for schedule in SCHEDULES if WHOLE_GRID else (SCHEDULES[1 + i % (len(SCHEDULES) - 1)],):
                with self.subTest(name=name, schedule=schedule):
                    self.check(name, *schedule)

    def test_an_error_of_a_rank_is_printed_once(self):
        # A token that the embedding does not have is found by the rank that looks it up.
        inputs = pathlib.Path(ZOO, "gpt.inputs.safetensors").read_bytes()
        begin = 8 + struct.unpack("<Q", inputs[:8])[0]
        path = pathlib.Path(self.path("inputs.safetensors"))
        path.write_bytes(inputs[:begin] + struct.pack("<q", 10**6) + inputs[begin + 8:])
        result = self.penstock("run", self.model("gpt"), "--stages", 2, "--transport", "gloo", "--inputs", path,
                               "--output", self.path("out.safetensors"), code=2)
        self.assertEqual(result.stdout, "")
        self.assertEqual(len(re.findall(r"^penstock: ", result.stderr, re.M)), 1, result.stderr)
        self.assertRegex(result.stderr, r"^penstock: rank 0, stage 0, 0F0 \(microbatch 0\): .*: index out of range in self\n")

    def test_ranks_end_on_sigterm(self):
        process = subprocess.Popen(
            [PENSTOCK, "check", self.model("mlp"), "--stages", "2", "--transport", "gloo", "--microbatches", "100000"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": self.temporary}
        )
        deadline = time.monotonic() + 60
        while not os.listdir(self.temporary) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        process.terminate()
        _, text = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 2)
        self.assertRegex(text, r"^penstock: rank \d ended by signal 15 \(Terminated\)\.$")
        self.assertEqual(os.listdir(self.temporary), [])


    def test_the_next_command_removes_files_of_a_killed_one(self):
        words = [PENSTOCK, "check", self.model("mlp"), "--stages", "2", "--transport", "gloo", "--microbatches", "100000"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   env={**os.environ, "TMPDIR": self.temporary})
        deadline = time.monotonic() + 60
        while not os.listdir(self.temporary) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait(timeout=60)
        (left,) = os.listdir(self.temporary)
        # One of a user, and one of a command that runs.
        mine = pathlib.Path(self.temporary, "penstock-mine")
        mine.mkdir()
        used = pathlib.Path(self.temporary, "penstock-abcdef")
        used.mkdir()
        lock = os.open(used, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([PENSTOCK, "check", self.model("mlp"), "--stages", "2", "--transport", "gloo"], check=True, timeout=120,
                       stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": self.temporary})
        self.assertEqual(sorted(os.listdir(self.temporary)), ["penstock-abcdef", "penstock-mine"])
        os.close(lock)


class Run(Case):
    def test_gives_the_outputs_on_threads_and_processes(self):
        inputs = os.path.join(ZOO, "gpt.inputs.safetensors")
        expected = read_tensors(os.path.join(ZOO, "gpt.expected.safetensors"))["output.0"]
        for transport in ("threads", "gloo"):
            text = self.answers("run", self.model("gpt"), "--stages", 2, "--transport", transport, "--inputs", inputs,
                                "--output", self.path("out.safetensors"))
            self.assertRegex(text, r"^output\.0 float32\[\d+, \d+, \d+\]\n\d+ rows, [\d.]+( k)? rows/s\n$")
            found = read_tensors(self.path("out.safetensors"))
            self.assertEqual(list(found), ["output.0"])
            self.assertLessEqual(max(abs(a - b) for a, b in zip(expected, found["output.0"], strict=True)), 1e-5)

    def test_rows_need_not_divide_by_the_microbatches(self):
        inputs = os.path.join(ZOO, "gpt_dynamic.inputs.safetensors")
        expected = read_tensors(os.path.join(ZOO, "gpt_dynamic.expected.safetensors"))["output.0"]
        words = [self.model("gpt_dynamic"), "--stages", 2, "--microbatches", 5, "--inputs", inputs]
        text = self.answers("run", *words, "--output", self.path("out.safetensors"))
        rows = int(re.search(r"(\d+) rows,", text)[1])
        self.assertNotEqual(rows % 5, 0)
        found = read_tensors(self.path("out.safetensors"))["output.0"]
        self.assertLessEqual(max(abs(a - b) for a, b in zip(expected, found, strict=True)), 1e-5)
        self.assertIn("5 microbatches", self.answers("check", *words))


if __name__ == "__main__":
    unittest.main()
