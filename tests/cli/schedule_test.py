"""Tests of penstock schedule: output, messages, exit codes and files. PENSTOCK names the command."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import termios
import unittest

from command_case import PENSTOCK, CommandCase, penstock


def schedule(*words):
    return penstock("schedule", *words)


class Case(CommandCase):
    def write(self, name, text):
        with open(self.path(name), "w", newline="") as file:
            file.write(text)
        return self.path(name)

    def answers(self, *words):
        return super().answers("schedule", *words)


class Usage(Case):
    def test_help_at_every_level(self):
        for words in ((), ("schedule",), *((("schedule", name)) for name in ("list", "show", "export", "verify", "simulate", "compare"))):
            result = penstock(*words, "--help")
            self.assertEqual(result.returncode, 0, words)
            self.assertIn("Usage: penstock", result.stdout)
        self.assertRegex(penstock("--version").stdout, r"^penstock \d+\.\d+\.\d+\n$")

    def test_suggests_the_nearest_word_for_an_unknown_one(self):
        self.refuses("shedule", "list", message="unknown command 'shedule'.\n  Hint: did you mean schedule?")
        self.refuses("schedule", "sho", message="penstock schedule: unknown command 'sho'.\n  Hint: did you mean show?")
        self.refuses("schedule", "simulate", "gpipe", "--rnks", 4, message="unknown option '--rnks'.\n  Hint: did you mean --ranks?")
        self.refuses("schedule", "show", "gpipe", "--rnks=4", message="unknown option '--rnks'.")
        self.refuses("schedule", "show", "gpip", "--ranks", 4, "--microbatches", 8, message="did you mean GPipe?")
        self.refuses("schedule", "show", "gpipe", "--ranks", 4, "--microbatches", 8, "--format", "hmtl", message="did you mean html?")

    def test_says_what_is_missing_or_out_of_range(self):
        self.refuses(message="A subcommand is required")
        self.refuses("schedule", message="A subcommand is required")
        self.refuses("schedule", "show", message="the schedule is missing: give its name, or a file with --csv.")
        self.refuses("schedule", "show", "gpipe", "--microbatches", 4, message="--ranks is missing")
        self.refuses("schedule", "show", "gpipe", "--ranks", 4, message="--microbatches is missing")
        self.refuses("schedule", "show", "gpipe", "--ranks", 0, message="--ranks: '0' should be a whole number from 1 on")
        self.refuses("schedule", "show", "gpipe", "--ranks", "four", message="'four' should be a whole number")
        self.refuses("schedule", "simulate", "gpipe", "--latency=-1", message="'-1' should be a number that is not negative")
        self.refuses("schedule", "show", "gpipe", "--ranks", 4, "--microbatches", 4, "--stages-per-rank", 2, message="GPipe has one stage per rank, not 2")
        self.refuses("schedule", "show", "gpipe", "--csv", "x.csv", message="--csv")
        self.refuses("schedule", "compare", message="--ranks is missing")

    def test_names_what_is_wrong_with_edges_and_groups(self):
        size = ("--ranks", 4, "--microbatches", 2)
        self.refuses("schedule", "verify", "gpipe", *size, "--edges", "0-9", message="there can be no edge from stage 0 to stage 9")
        self.refuses("schedule", "verify", "gpipe", *size, "--edges", "0:3", message="--edges '0:3' is not a list of stages.\n  Hint: --edges 0-3,1-2")
        self.refuses("schedule", "verify", "gpipe", *size, "--edges", "0-1-2", message="is not a list of edges")
        self.refuses("schedule", "verify", "gpipe", *size, "--edges", "", message="is not a list of stages")
        self.refuses("schedule", "verify", "gpipe", *size, "--edges", "0-3,", message="is not a list of stages")
        self.answers("verify", "gpipe", *size, "--edges", "0-3", "--edges", "1-3")
        self.refuses("schedule", "verify", "gpipe", *size, "--shared", "0", message="at least two stages")
        self.refuses("schedule", "verify", "gpipe", *size, "--shared", "a", message="--shared 'a' is not a list of stages")

    def test_files_that_cannot_be_read_or_written(self):
        self.refuses("schedule", "verify", "--csv", self.path("none.csv"), message="none.csv: could not be read: No such file")
        self.refuses("schedule", "verify", "--csv", self.folder, message="could not be read")
        gpipe = ("schedule", "export", "gpipe", "--ranks", 2, "--microbatches", 2)
        self.refuses(*gpipe, "-o", self.path("none/file.csv"), message="could not be written: No such file")
        self.refuses(*gpipe, "-o", self.folder, message="is a directory; give the path of a file.")
        self.assertEqual(os.listdir(self.folder), [])

    def test_says_when_nothing_can_be_written(self):
        for words in (["list"], ["verify", "gpipe", "--ranks", "2", "--microbatches", "2"], ["show", "--help"],
                      ["compare", "--ranks", "2", "--microbatches", "2"], ["export", "gpipe", "--ranks", "2", "--microbatches", "2"]):
            with open("/dev/full", "w") as full:
                result = subprocess.run([PENSTOCK, "schedule", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual(result.returncode, 2, words)
            self.assertIn("could not be written", result.stderr)

    def test_writes_through_links_and_keeps_modes(self):
        file = self.write("out.csv", "")
        os.chmod(file, 0o600)
        os.symlink(file, self.path("link.csv"))
        self.answers("export", "gpipe", "--ranks", 2, "--microbatches", 2, "-o", self.path("link.csv"))
        self.assertTrue(os.path.islink(self.path("link.csv")))
        self.assertEqual(os.stat(file).st_mode & 0o777, 0o600)
        with open(file) as written:
            self.assertIn("0F0", written.read())

    def test_help_shows_default_values(self):
        text = self.answers("simulate", "--help")
        self.assertIn("--forward X [1]", text)
        self.assertIn("--latency X [0]", text)

    def test_does_not_load_libtorch(self):
        libraries = subprocess.run(["ldd", PENSTOCK], capture_output=True, text=True).stdout
        self.assertNotIn("torch", libraries)


class List(Case):
    def test_names_all_schedules(self):
        text = self.answers("list")
        for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ForwardOnly"):
            self.assertIn(name, text)


class Simulate(Case):
    def simulate(self, *words):
        return json.loads(self.answers("simulate", *words, "--json"))

    def test_makespans_of_the_papers(self):
        halves = ("--forward", ".5", "--input", ".5", "--weight", ".5", "--stages-per-rank", 2, "--ranks", 8, "--microbatches", 16)
        self.assertEqual(self.simulate("ZBVZeroBubble", *halves)["makespan"], 51.5)
        self.assertEqual(self.simulate("InterleavedZeroBubble", *halves)["makespan"], 51.5)
        self.assertEqual(self.simulate("Interleaved1F1B", *halves)["makespan"], 58.5)
        for name in ("GPipe", "1F1B"):
            self.assertEqual(self.simulate(name, "--ranks", 8, "--microbatches", 16)["makespan"], 69)

    def test_json_has_the_statistics(self):
        result = self.simulate("1f1b", "--ranks", 4, "--microbatches", 8)
        self.assertEqual(result["ranks"], 4)
        self.assertEqual(result["actions"], 64)
        self.assertEqual(result["peak_activations"], [4, 3, 2, 1])
        self.assertAlmostEqual(result["bubble"], 1 - 24 / 33)
        self.assertEqual(result["idle"][3], {"fill": 3, "drain": 6, "waiting": {}})

    def test_costs_from_options_and_file(self):
        size = ("gpipe", "--ranks", 2, "--microbatches", 1)
        self.assertEqual(self.simulate(*size, "--latency", 0.5)["makespan"], 7)
        self.assertEqual(self.simulate(*size, "--bandwidth", 2)["makespan"], 7)
        costs = self.write("costs.json", '{"version": 1, "stages": [{"forward": 10, "activation_bytes": 5}], "links": [{"from": 0, "to": 1, "latency": 3}]}')
        result = self.simulate(*size, "--costs", costs)
        self.assertEqual(result["makespan"], 10 + 3 + 3 + 2)
        self.assertEqual(result["peak_bytes"], [5, 0])
        measured = self.write("measured.json", '{"version": 2, "stages": [{"parameter_bytes": 5}]}')
        noted = self.penstock("schedule", "simulate", *size, "--costs", measured)
        self.assertEqual(noted.stderr, f"note: {measured} has the costs of 1 of 2 stages; the others take the default costs, without sizes.\n")
        bad = self.write("bad.json", '{"version": 9}')
        self.refuses("schedule", "simulate", *size, "--costs", bad, message="bad.json: version should be 1 or 2, but is 9")

    def test_recomputation_takes_time_and_frees_memory(self):
        costs = self.write("costs.json", json.dumps({
            "version": 2,
            "stages": [{"activation_bytes": 10, "weight_bytes": 4, "input_bytes": 1, "parameter_bytes": 100, "recompute": 0.5}] * 2,
            "ranks": [{"capacity": 120, "buffer_bytes": 5}, {"capacity": 200}],
        }))
        size = ("gpipe", "--ranks", 2, "--microbatches", 4, "--costs", costs)
        plain = self.simulate(*size)
        self.assertEqual(plain["peak_bytes"], [145, 140])
        self.assertEqual(plain["static_bytes"], [105, 100])
        self.assertEqual(plain["capacity"], [120, 200])
        self.assertEqual(plain["fits"], [False, True])
        recomputed = self.simulate(*size, "--recompute", "all")
        self.assertEqual(recomputed["peak_bytes"], [105 + 10 + 3, 100 + 10 + 3])
        self.assertEqual(recomputed["work"], [4 * 3.5, 4 * 3.5])
        self.assertEqual(self.simulate(*size, "--recompute", "stages"), recomputed)
        self.assertEqual(self.simulate(*size, "--recompute", "none"), plain)
        self.assertEqual(self.simulate(*size, "--recompute", "1")["peak_bytes"], [145, 113])
        text = self.answers("simulate", *size)
        self.assertRegex(text, r"peak bytes +capacity +fits +waits most for\n0 .* 145 +120 +no ")
        self.assertRegex(text, r"\n1 .* 140 +200 +yes ")
        self.refuses("schedule", "simulate", *size, "--recompute", "0;1", message="--recompute '0;1' is not a list of stages")
        self.refuses("schedule", "simulate", *size, "--recompute", "2", message="there is no stage 2 to recompute")

    def test_skips_cost_messages(self):
        plain = self.simulate("gpipe", "--ranks", 4, "--microbatches", 2)["messages"]
        self.assertEqual(self.simulate("gpipe", "--ranks", 4, "--microbatches", 2, "--edges", "0-3,1-2")["messages"], plain + 4)

    def test_text_is_a_table(self):
        self.assertIn("makespan 33.000   longest rank span 33.000   bubble 27.3 %", self.answers("simulate", "gpipe", "--ranks", 4, "--microbatches", 8))


class Verify(Case):
    def test_a_valid_schedule_prints_one_line_and_exits_with_zero(self):
        text = self.answers("verify", "dualpipev", "--ranks", 4, "--microbatches", 3, "--edges", "0-3,1-2", "--shared", "0,7")
        self.assertEqual(text.count("\n"), 1)
        self.assertIn("valid", text)

    def test_a_violation_exits_with_one_and_marks_its_place(self):
        result = schedule("verify", "--csv", self.write("bad.csv", "0F0,0B0\n1B0,1F0\n"))
        self.assertEqual(result.returncode, 1)
        self.assertIn("bad.csv:2:1: rank 1, 1B0: 1B0 comes before its forward 1F0.", result.stdout)
        self.assertIn("0     0F0     [1B0]   <-- here", result.stdout)

    def test_a_deadlock_names_its_cycle(self):
        file = self.write("stuck.csv", "# Rank 0.\n0F0,,0B0,0F1,0B1\n\n1F1,1F0,1B0,1B1  # rank 1\n")
        result = schedule("verify", "--csv", file)
        self.assertEqual(result.returncode, 1)
        cycle = (f"{file}:2:6: rank 0, 0B0: deadlock, the ranks wait for each other in a cycle:\n"
                 f"  rank 0, {file}:2:6: 0B0 waits for 1B0 on rank 1\n"
                 f"  rank 1, {file}:4:1: 1F1 waits for 0F1 on rank 0\n")
        self.assertIn(cycle, result.stdout)
        # The same places, and no action that is not in the file, wherever the schedule is lowered first.
        table = result.stdout[result.stdout.index("step"):]
        for words in (["show"], ["show", "--lowered"], ["simulate"], ["export"], ["export", "--lowered"], ["compare"]):
            self.assertIn(cycle + "\n" + table, self.refuses("schedule", *words, "--csv", file, message=cycle), words)

    def test_a_sum_without_shared_parameters_names_the_option(self):
        file = self.write("sum.csv", "0F0,0B0,0SUM_SHARED\n1F0,1B0,1SUM_SHARED\n")
        result = schedule("verify", "--csv", file)
        self.assertEqual(result.returncode, 1)
        hint = ("stage 0 shares no parameters.\n"
                "  Hint: declare the stages that share parameters as a group of the stage graph (--shared 0,3).")
        self.assertIn(f"{file}:1:9: rank 0, 0SUM_SHARED: {hint}", result.stdout)
        self.refuses("schedule", "simulate", "--csv", file, message=hint)
        self.answers("verify", "--csv", file, "--shared", "0,1")

    def test_a_file_with_reductions_alone_gets_its_messages(self):
        text = self.answers("verify", "--csv", self.write("half.csv", "0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n"))
        self.assertIn("2 messages", text)
        self.assertIn("1SEND_B0", self.answers("export", "--csv", self.path("half.csv"), "--lowered"))

    def test_a_file_that_is_not_a_schedule_is_a_usage_error(self):
        self.refuses("schedule", "verify", "--csv", self.write("bad.csv", "0F0,0X0\n"), message="bad.csv:1:5: '0X0' is not an action")
        self.refuses("schedule", "simulate", "--csv", self.write("bad.csv", "0F0,0B0\n1B0,1F0\n"), message="1B0 comes before its forward")


class ExportAndShow(Case):
    SIZE = ("--ranks", 3, "--microbatches", 4)

    def test_a_file_comes_back_as_it_was(self):
        for lowered in ((), ("--lowered",)):
            for name in ("gpipe", "zbvzerobubble", "dualpipev", "forwardonly"):
                file = self.path("out.csv")
                self.assertEqual(self.answers("export", name, *self.SIZE, *lowered, "-o", file), "")
                again = self.answers("export", "--csv", file, *lowered)
                with open(file) as written:
                    self.assertEqual(again, written.read())
                self.assertIn("valid", self.answers("verify", "--csv", file))
        self.assertEqual(os.listdir(self.folder), ["out.csv"])

    def test_names_what_torch_cannot_read(self):
        result = self.penstock("schedule", "export", "1F1B", "--ranks", 2, "--microbatches", 2, "--recompute", "all")
        self.assertEqual(result.stdout, "0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n")
        self.assertEqual(result.stderr, "note: torch.distributed.pipelining refuses this file: it does not know recomputations (0R0).\n")
        result = self.penstock("schedule", "export", "1F1B", "--ranks", 3, "--microbatches", 2, "--lowered", "--edges", "0-2",
                               "--shared", "0,2")
        self.assertEqual(result.stderr, "note: torch.distributed.pipelining refuses this file: it does not know sums of shared parameters (0SUM_SHARED).\n"
                         "note: torch.distributed.pipelining misreads this file: it does not know messages off the chain (0RECV_B0@2).\n")
        self.assertEqual(self.penstock("schedule", "export", "1F1B", "--ranks", 2, "--microbatches", 2).stderr, "")

    def test_drawings(self):
        self.assertIn("rank 2 |", self.answers("show", "1F1B", *self.SIZE))
        self.assertIn("1SEND_F0", self.answers("show", "1F1B", *self.SIZE, "--lowered"))
        self.assertTrue(self.answers("show", "1F1B", *self.SIZE, "--format", "svg").startswith("<svg"))
        self.assertIn("<!doctype html>", self.answers("show", "1F1B", *self.SIZE, "--format", "html").lower())
        trace = json.loads(self.answers("show", "1F1B", *self.SIZE, "--format", "trace", "--lowered"))
        self.assertIn("1RECV_F0", {event["name"] for event in trace["traceEvents"]})

    def test_no_colour_where_there_is_no_terminal(self):
        self.assertNotIn("\033", self.answers("show", "1F1B", *self.SIZE))

    def on_a_terminal(self, columns, *words, **environment):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen([PENSTOCK, "schedule", *map(str, words)], stdout=theirs, env={**os.environ, **environment})
        os.close(theirs)
        text = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # The other end is closed.
                break
            if not piece:
                break
            text += piece
        os.close(ours)
        self.assertEqual(process.wait(timeout=60), 0)
        return text.decode()

    def test_colour_and_width_of_a_terminal(self):
        show = ("show", "1F1B", "--ranks", 3, "--microbatches", 20)
        painted = self.on_a_terminal(100, *show)
        self.assertIn("\033[30;48;5;", painted)
        plain = self.on_a_terminal(100, *show, NO_COLOR="1")
        self.assertNotIn("\033", plain)
        self.assertLessEqual(max(len(line) for line in plain.splitlines() if line.startswith("rank")), 100)
        file = self.path("out.txt")
        self.on_a_terminal(40, *show, "-o", file)
        with open(file) as written:
            self.assertEqual(written.read(), self.answers(*show))


class Compare(Case):
    def test_best_first_with_the_same_work(self):
        rows = [line.split() for line in self.answers("compare", "--ranks", 8, "--microbatches", 16).splitlines()[1:]]
        makespans = {row[0]: float(row[2]) for row in rows}
        self.assertEqual(list(makespans.values()), sorted(makespans.values()))
        self.assertEqual(makespans["ZBVZeroBubble"], 51.5)
        self.assertEqual(makespans["Interleaved1F1B"], 58.5)
        self.assertEqual(makespans["GPipe"], 69)
        self.assertEqual(len(makespans), 7)

    def test_costs_by_rank(self):
        costs = self.write("costs.json", '{"version": 1, "stages": [{"forward": 4}, {}]}')
        rows = self.answers("compare", "--ranks", 2, "--microbatches", 4, "--costs", costs).splitlines()
        makespans = {row.split()[0]: float(row.split()[2]) for row in rows[1:]}
        # Four forwards of 4 on the first rank, one on the second; then backwards of 2, one behind the other.
        self.assertEqual(makespans["GPipe"], 4 * 4 + 1 + 4 * 2 + 2)
        self.refuses("schedule", "compare", "--ranks", 1, "--microbatches", 4, "--costs", costs, message='2 entries in "stages", but there are 1.\n  Hint: `compare` takes one entry for each rank')

    def compared(self, *words):
        result = json.loads(self.answers("compare", *words, "--json"))
        return result, {row["schedule"]: row for row in result["schedules"]}

    def test_json_has_what_the_table_has(self):
        result, rows = self.compared("--ranks", 8, "--microbatches", 16)
        self.assertEqual((result["version"], result["ranks"], result["microbatches"]), (1, 8, 16))
        self.assertEqual(rows["ZBVZeroBubble"]["makespan"], 51.5)
        self.assertEqual((rows["ZBVZeroBubble"]["stages"], rows["ZBVZeroBubble"]["stages_per_rank"]), (16, 2))
        self.assertEqual((rows["GPipe"]["peak_microbatches"], rows["1F1B"]["peak_microbatches"]), (16, 8))
        for line in self.answers("compare", "--ranks", 8, "--microbatches", 16).splitlines()[1:]:
            name, stages, makespan, span, bubble, _, peak, messages = line.split()
            row = rows[name]
            self.assertEqual((int(stages), float(makespan), float(span), float(peak), int(messages)),
                             (row["stages_per_rank"], row["makespan"], row["longest_span"], round(row["peak_microbatches"], 1), row["messages"]))
            self.assertAlmostEqual(float(bubble), 100 * row["bubble"], delta=0.05)

    def test_stages_a_rank_for_those_that_take_any_number(self):
        _, rows = self.compared("--ranks", 4, "--microbatches", 8, "--stages-per-rank", 4)
        self.assertEqual({name: row["stages_per_rank"] for name, row in rows.items()},
                         {"GPipe": 1, "1F1B": 1, "LoopedBFS": 4, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4,
                          "ZBVZeroBubble": 2, "DualPipeV": 2})

    def test_own_schedules_beside_the_others(self):
        first, second = self.path("first.csv"), self.path("second.csv")
        self.answers("export", "1F1B", "--ranks", 2, "--microbatches", 3, "-o", first)
        self.answers("export", "GPipe", "--ranks", 2, "--microbatches", 3, "--lowered", "-o", second)
        result, rows = self.compared("--csv", first, "--csv", second)
        self.assertEqual((result["ranks"], result["microbatches"], len(rows)), (2, 3, 9))
        for file, name in ((first, "1F1B"), (second, "GPipe")):
            self.assertEqual({**rows[file], "schedule": name}, rows[name])
        self.assertIn(first, self.answers("compare", "--csv", first))
        uneven = self.write("uneven.csv", "0F0,1F0,1B0,0B0\n2F0,2B0\n")
        self.assertIn("1 to 2", self.answers("compare", "--csv", uneven))
        self.refuses("schedule", "compare", "--csv", first, "--microbatches", 4,
                     message="first.csv: found 2 ranks, 2 stages, 3 microbatches, but the schedules it is compared with have 2 ranks and 4 microbatches.\n  Hint: ")
        self.refuses("schedule", "compare", "--csv", self.write("forwards.csv", "0F0\n1F0\n"),
                     message="forwards.csv: has no backwards, and only schedules of whole steps can be compared")

    def test_capacities_of_ranks_mark_what_fits(self):
        costs = self.write("costs.json", json.dumps({
            "version": 2, "stages": [{"activation_bytes": 1000, "parameter_bytes": 500}] * 2,
            "ranks": [{"capacity": 2500}, {"capacity": 8500}]}))
        _, rows = self.compared("--ranks", 2, "--microbatches", 8, "--costs", costs)
        fits = {name: row["fits"] for name, row in rows.items()}
        self.assertEqual((rows["GPipe"]["peak_bytes"], fits["GPipe"], fits["1F1B"]), (8500, False, True))
        self.assertEqual(rows["1F1B"]["peak_bytes_by_rank"], [2500, 1500])
        _, rows = self.compared("--ranks", 2, "--microbatches", 8, "--costs", costs, "--memory", "2kB")
        self.assertFalse(rows["1F1B"]["fits"])

    def test_memory_marks_what_fits(self):
        size = ("--ranks", 4, "--microbatches", 8)
        rows = [line.split() for line in self.answers("compare", *size, "--memory", 4).splitlines()]
        self.assertEqual(rows[0][-1], "fits")
        fits = {row[0]: row[-1] for row in rows[1:]}
        self.assertEqual((fits["1F1B"], fits["ZBVZeroBubble"], fits["GPipe"], fits["DualPipeV"]), ("yes", "yes", "no", "no"))
        # 1000 bytes per microbatch: GPipe saves activations of 8 microbatches on each rank, 1F1B of 4 on the first.
        costs = self.write("costs.json", json.dumps({"version": 1, "stages": [{"activation_bytes": 1000}] * 4}))
        for limit, of_gpipe, of_1f1b in (("8kB", True, True), ("7.9kB", False, True), ("4000B", False, True), ("3.9KiB", False, False)):
            result, rows = self.compared(*size, "--costs", costs, "--memory", limit)
            self.assertEqual((rows["GPipe"]["fits"], rows["1F1B"]["fits"]), (of_gpipe, of_1f1b), limit)
            self.assertEqual(rows["GPipe"]["peak_bytes"], 8000)
        self.assertEqual(result["memory"], {"bytes": 3.9 * 1024})
        self.assertIn("peak bytes", self.answers("compare", *size, "--costs", costs))

    def test_memory_that_cannot_be_compared(self):
        size = ("schedule", "compare", "--ranks", 4, "--microbatches", 8)
        for wrong in ("much", "4 apples", "-1", "0", "nan", "4mb"):
            self.refuses(*size, f"--memory={wrong}", message=f"--memory '{wrong}' is neither a number of microbatches nor of bytes.\n  Hint: --memory 4")
        self.refuses(*size, "--memory", "1GB", message="--memory 1GB is in bytes, but the costs do not give the size of the activations of rank 0.\n  Hint: give activation_bytes")
        costs = self.write("costs.json", '{"version": 1, "stages": [{"activation_bytes": 1}, {}]}')
        self.refuses(*size, "--costs", costs, "--memory", "1GB", message="the size of the activations of rank 1")


if __name__ == "__main__":
    unittest.main()
