"""Shows faults of the installed torch.distributed.pipelining in schedules, their validation, files and drawings, and that
Penstock does not have them. If a new version of PyTorch fixes a fault, its test fails here, and the documentation has to be
updated.

    PENSTOCK=build/release/bin/penstock faults.py

Without PENSTOCK, only PyTorch is tested. Numbers in brackets are the items of the list of PyTorch's faults.
"""

import contextlib
import csv
import inspect
import io
import json
import os
import pathlib
import subprocess
import tempfile
import unittest
from unittest import mock

from load_csv import Runner
from schedules import MULTI_STAGE, RecordingStage, construct, construct_single_stage, reference, run_single_stage, stand_ins
from torch.distributed.pipelining import _schedule_visualizer as drawings

PENSTOCK = os.environ.get("PENSTOCK")
VALID, INVALID, BAD_INPUT = 0, 1, 2


def ours(test):
    return unittest.skipUnless(PENSTOCK, "PENSTOCK does not name the command")(test)


class FaultTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)

    def penstock(self, *words, exits=VALID):
        """Runs `penstock schedule …`; returns its standard output and error."""
        command = [PENSTOCK, "schedule", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, exits, f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        if exits != VALID:
            self.assertTrue(done.stdout + done.stderr, "it failed without a message")
        return done.stdout + done.stderr

    def file(self, text):
        path = self.directory / "schedule.csv"
        path.write_text(text)
        return path

    def verify(self, text, exits):
        return self.penstock("verify", "--csv", self.file(text), exits=exits)

    def rows(self, *words):
        return list(csv.reader(io.StringIO(self.penstock("export", *words))))

    def reference_loads(self, text, ranks, stages_per_rank, microbatches, form="compute_only"):
        runtime = reference._PipelineScheduleRuntime(stand_ins(ranks, stages_per_rank), microbatches)
        runtime._load_csv(str(self.file(text)), format=form)
        return runtime

    def reference_validates(self, text, ranks, stages, microbatches):
        """Runs its validation only, without the lowering, which may fail later."""
        rows = csv.reader(io.StringIO(text))
        lists = {rank: [reference._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        return reference._validate_schedule(lists, ranks, stages, microbatches)


def quietly(function, *arguments, **options):
    """Captures what PyTorch's drawings and simulator print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = function(*arguments, **options)
    return result, printed.getvalue()


class OneForwardOneBackward(FaultTest):
    """[12]"""

    def reference_actions(self):
        return run_single_stage([construct_single_stage("1F1B", rank, 4, 8) for rank in range(4)], 8)

    def test_the_reference_lists_the_last_rank_one_microbatch_late(self):
        listed = reference.Schedule1F1B(RecordingStage(0, 4), 8).pipeline_order[3]
        forwards = [action.microbatch_index for action in listed if action.computation_type == reference.F]
        self.assertEqual(forwards, [1, 2, 3, 4, 5, 6, 7, 8])
        runs = self.reference_actions()[3]
        self.assertEqual([str(action) for action in runs[:4]], ["3F0", "3B0", "3F1", "3B1"])

    @ours
    def test_ours_lists_the_actions_that_the_reference_runs(self):
        rows = self.rows("1F1B", "--ranks", 4, "--microbatches", 8)
        self.assertEqual(rows, [[str(action) for action in actions] for actions in self.reference_actions()])
        self.assertEqual(rows[3][0], "3F0")


class DrawingOfAV(FaultTest):
    """[12]"""

    @staticmethod
    def rank_of(stage):
        return min(stage, 7 - stage)

    def test_the_reference_draws_actions_on_wrong_ranks(self):
        drawn, _ = quietly(drawings.get_schedule_ops, "ZBVZeroBubble", 4, 8, add_spacing=True)
        misplaced = [
            action
            for rank, actions in enumerate(drawn)
            for action in actions
            if action is not None and self.rank_of(action.stage_index) != rank
        ]
        self.assertNotEqual(misplaced, [])

    @ours
    def test_ours_draws_every_action_on_its_rank(self):
        trace = json.loads(self.penstock("show", "ZBVZeroBubble", "--ranks", 4, "--microbatches", 8, "--format", "trace"))
        drawn = {rank: set() for rank in range(4)}
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                drawn[event["pid"]].add(event["name"])
        wanted = {rank: set() for rank in range(4)}
        for stage in range(8):
            for microbatch in range(8):
                wanted[self.rank_of(stage)] |= {f"{stage}{kind}{microbatch}" for kind in "FIW"}
        self.assertEqual(drawn, wanted)


class OtherDrawings(FaultTest):
    """[12, 44]"""

    def test_the_reference_cannot_space_out_its_single_stage_schedules(self):
        for name in ("GPipe", "1F1B"):
            with self.subTest(name), self.assertRaises((RuntimeError, AssertionError, KeyError)):
                quietly(drawings.get_schedule_ops, name, 4, 8, add_spacing=True)

    def test_the_reference_cannot_show_their_messages(self):
        for name in ("GPipe", "1F1B"):
            with self.subTest(name), self.assertRaises(TypeError):
                quietly(drawings.get_schedule_ops, name, 4, 8, with_comms=True)

    def test_the_reference_prints_every_tick(self):
        _, printed = quietly(drawings.get_schedule_ops, "Interleaved1F1B", 2, 4, add_spacing=True)
        self.assertGreater(printed.count("Current timestep"), 10)

    def test_the_reference_takes_input_backwards_for_communication(self):
        path = self.directory / "trace.json"
        reference._dump_chrometrace({0: [reference._Action(0, reference.F, 0), reference._Action(0, reference.I, 0)]}, path)
        events = json.loads(path.read_text())["traceEvents"]
        self.assertEqual([event["cat"] for event in events], ["computation", "communication"])

    @ours
    def test_ours_draws_them_all(self):
        for name in ("GPipe", "1F1B", "InterleavedZeroBubble", "DualPipeV"):
            for form in ("text", "svg", "html", "trace"):
                for lowered in ([], ["--lowered"]):
                    with self.subTest(name=name, form=form, lowered=lowered):
                        size = ("--ranks", 4, "--microbatches", 8)
                        self.assertTrue(self.penstock("show", name, *size, "--format", form, *lowered))

    @ours
    def test_ours_takes_input_backwards_for_computation(self):
        trace = json.loads(self.penstock("show", "ZBVZeroBubble", "--ranks", 2, "--microbatches", 4, "--format", "trace"))
        kinds = {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X" and "I" in event["name"]}
        self.assertEqual(kinds, {"computation"})


class LastStageOutOfOrder(FaultTest):
    """[13]"""

    SCHEDULE = "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"

    def test_the_reference_accepts_it(self):
        self.reference_loads(self.SCHEDULE, ranks=2, stages_per_rank=1, microbatches=2)

    def test_the_reference_then_gives_a_microbatch_the_loss_of_another(self):
        runtime = reference._PipelineScheduleRuntime(stand_ins(2, 1), 2, loss_fn=lambda output, target: output)
        stage = RecordingStage(1, 2)
        for microbatch in (1, 0):
            runtime._maybe_compute_loss(stage, f"loss of microbatch {microbatch}", [None, None], microbatch)
        self.assertEqual(runtime._maybe_get_loss(stage, 0), "loss of microbatch 1")

    @ours
    def test_ours_accepts_it(self):
        # The tests of the runtime check that the losses are right then.
        self.verify(self.SCHEDULE, VALID)


class Simulator(FaultTest):
    """[27]"""

    def test_the_reference_simulates_none_of_its_own_schedules(self):
        for name in MULTI_STAGE:
            with self.subTest(name), self.assertRaisesRegex(ValueError, "Unsupported action type"):
                quietly(construct(name, 2, 2, 4)._simulate)

    def test_the_reference_counts_ticks_and_no_costs(self):
        self.assertEqual([*inspect.signature(reference._simulate_comms_compute).parameters][1:], ["stage_to_rank", "num_stages"])
        lists = {0: [reference._Action(0, reference.F, 0), reference._Action(0, reference.B, 0)]}
        self.assertEqual(len(reference._simulate_comms_compute(lists, lambda stage: 0, 1)[0]), 2)

    def simulated(self, *words):
        return json.loads(self.penstock("simulate", *words, "--json"))

    @ours
    def test_ours_simulates_lowered_schedules(self):
        for name in MULTI_STAGE:
            with self.subTest(name):
                size = (name, "--ranks", 4, "--stages-per-rank", 2, "--microbatches", 8)
                path = self.directory / "lowered.csv"
                self.penstock("export", *size, "--lowered", "-o", path)
                by_file = self.simulated("--csv", path)
                # Three units of time for each stage and microbatch.
                self.assertAlmostEqual((1 - by_file["bubble"]) * 4 * by_file["makespan"], 3 * 8 * 8)
                by_name = self.simulated(*size)
                for key in ("makespan", "bubble", "ranks", "actions", "peak_activations"):
                    self.assertEqual(by_file[key], by_name[key], key)

    @ours
    def test_ours_simulates_with_costs(self):
        path = self.file("0F0,0B0\n")
        self.assertEqual(self.simulated("--csv", path)["makespan"], 3)
        self.assertEqual(self.simulated("--csv", path, "--forward", 2, "--input", 3, "--weight", 4)["makespan"], 9)


class FewStepsManyRanks(FaultTest):
    """[27]"""

    BACKWARD_FIRST = "0F0,0B0\n1F0,1B0\n2B0,2F0\n"

    def test_the_reference_cannot_print_the_table(self):
        lists = {rank: [reference._Action(rank, reference.F, 0)] for rank in range(4)}
        with self.assertRaises(IndexError):
            reference._format_pipeline_order(lists)

    def test_the_reference_cannot_print_the_error(self):
        with self.assertRaises(IndexError):
            self.reference_validates(self.BACKWARD_FIRST, ranks=3, stages=3, microbatches=1)

    @ours
    def test_ours_prints_it(self):
        table = self.penstock("show", "ForwardOnly", "--ranks", 12, "--stages-per-rank", 1, "--microbatches", 1, "--lowered")
        for rank in range(12):
            self.assertIn(f"{rank}F0", table)
        self.assertIn("2B0", self.verify(self.BACKWARD_FIRST, INVALID))


class Validation(FaultTest):
    """[28]"""

    DUPLICATE = "0F0,0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    GAP = "0F0,0F2,0B0,0B2\n1F0,1F2,1B0,1B2\n"
    LOCAL_ORDER = "1F0,0F0,0B0,1B0\n"
    DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"
    FORWARDS = "0F0,0F1\n1F0,1F1\n"
    NO_STAGE_1 = "0F0,0B0\n2F0,2B0\n"

    def test_the_reference_accepts_a_duplicate(self):
        self.reference_loads(self.DUPLICATE, ranks=2, stages_per_rank=1, microbatches=2)

    @ours
    def test_ours_refuses_a_duplicate(self):
        self.assertIn("0F0", self.verify(self.DUPLICATE, INVALID))

    def test_the_reference_accepts_microbatches_out_of_range(self):
        self.reference_loads(self.GAP, ranks=2, stages_per_rank=1, microbatches=2)

    @ours
    def test_ours_refuses_a_gap_between_microbatches(self):
        self.assertIn("0F1", self.verify(self.GAP, INVALID))

    def test_the_reference_validates_a_stage_before_the_one_that_feeds_it(self):
        self.assertEqual(self.reference_validates(self.LOCAL_ORDER, ranks=1, stages=2, microbatches=1), {0: 0, 1: 0})

    @ours
    def test_ours_refuses_a_stage_before_the_one_that_feeds_it(self):
        self.assertIn("1F0", self.verify(self.LOCAL_ORDER, INVALID))

    def test_the_reference_validates_a_deadlock(self):
        self.assertEqual(self.reference_validates(self.DEADLOCK, ranks=2, stages=2, microbatches=2), {0: 0, 1: 1})
        # Its lowering fails on the deadlock, without a location or a reason.
        with self.assertRaisesRegex(AssertionError, "^Malformed compute schedule, can't schedule sends/recvs$"):
            self.reference_loads(self.DEADLOCK, ranks=2, stages_per_rank=1, microbatches=2)

    @ours
    def test_ours_names_the_cycle_of_a_deadlock(self):
        message = self.verify(self.DEADLOCK, INVALID)
        for part in ("rank 0", "rank 1", "0B0", "1F1"):
            self.assertIn(part, message)

    def test_the_reference_refuses_forwards_alone(self):
        with self.assertRaisesRegex(AssertionError, "expected 2 total backwards"):
            self.reference_loads(self.FORWARDS, ranks=2, stages_per_rank=1, microbatches=2)

    @ours
    def test_ours_accepts_forwards_alone(self):
        self.verify(self.FORWARDS, VALID)

    def test_the_reference_fails_on_a_stage_out_of_range(self):
        with self.assertRaises(KeyError):
            self.reference_loads(self.NO_STAGE_1, ranks=2, stages_per_rank=1, microbatches=1)

    @ours
    def test_ours_names_the_missing_stage(self):
        self.assertIn("stage 1", self.verify(self.NO_STAGE_1, BAD_INPUT))


class LoweredFiles(FaultTest):
    """[28]"""

    GOOD = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    BAD = {
        "no receive": ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", "1RECV_F0"),
        "no send": ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0SEND_F0"),
        "received twice": ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0\n", "1RECV_F0"),
        "sent before it is made": ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "0SEND_F0"),
        "received too late": ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", "1RECV_F0"),
        "never resharded": ("0UNSHARD,0F0,0B0\n", "stage 0"),
        "computed while sharded": ("0UNSHARD,0F0,0RESHARD,0B0\n", "0B0"),
        "reduced too early": ("0F0,0REDUCE_GRAD,0B0\n", "stage 0"),
    }

    def test_the_reference_checks_computations_only(self):
        for what, (text, _) in {"good": (self.GOOD, ""), **self.BAD}.items():
            with self.subTest(what):
                self.reference_loads(text, text.count("\n"), 1, 1, form="compute_comms")

    @ours
    def test_ours_refuses_invalid_schedules(self):
        self.verify(self.GOOD, VALID)
        for what, (text, named) in self.BAD.items():
            with self.subTest(what):
                self.assertIn(named, self.verify(text, INVALID))


class ActionText(FaultTest):
    """[28]"""

    def test_the_reference_ignores_trailing_and_missing_text(self):
        self.assertEqual(reference._Action.from_str("1F0junk"), reference._Action(1, reference.F, 0))
        self.assertEqual(reference._Action.from_str("2F"), reference._Action(2, reference.F, None))

    @ours
    def test_ours_refuses_it_with_its_location(self):
        for text in ("1F0junk", "2F", "F0", "1X0", "(0F0;1B0)OVERLAP", "0UNSHARD3", "99999999999F0"):
            with self.subTest(text):
                message = self.verify(f"0F0,0B0\n1F0,{text}\n", BAD_INPUT)
                self.assertIn(text, message)
                self.assertIn("schedule.csv:2:5", message)


class MessageNamingStage(RecordingStage):
    """A stage whose messages are represented by their names."""

    def get_fwd_recv_ops(self, microbatch):
        return [f"RECV_F{microbatch}"]

    def get_fwd_send_ops(self, microbatch):
        return [f"SEND_F{microbatch}"]

    def get_bwd_recv_ops(self, microbatch):
        return [f"RECV_B{microbatch}"]

    def get_bwd_send_ops(self, microbatch):
        return [f"SEND_B{microbatch}"]


class MessagesWhileComputing(FaultTest):
    """[36]"""

    def log_of_the_middle_rank(self, schedule_class):
        stage = MessageNamingStage(1, 3)
        log = stage.ran

        def post(messages, desc=None):
            log.extend(("post", message) for message in messages)
            return messages

        def wait(messages):
            log.extend(("wait", message) for message in messages)

        with (
            mock.patch.object(reference, "_batch_p2p", post),
            mock.patch.object(reference, "_sorted_batch_p2p", lambda messages, desc=None: {0: post(messages)}),
            mock.patch.object(reference, "_wait_batch_p2p", wait),
        ):
            run_single_stage([schedule_class(stage, 8, loss_fn=lambda output, target: 0.0)], 8)
        return log

    def test_the_reference_computes_nothing_while_it_receives(self):
        for schedule_class in (reference.ScheduleGPipe, reference.Schedule1F1B):
            with self.subTest(schedule_class.__name__):
                log = self.log_of_the_middle_rank(schedule_class)
                receives = [entry[1] for entry in log if entry[0] == "post" and entry[1].startswith("RECV")]
                self.assertEqual(len(receives), 16)
                for receive in receives:
                    between = log[log.index(("post", receive)) : log.index(("wait", receive))]
                    self.assertFalse([entry for entry in between if isinstance(entry, reference._Action)], receive)

    @ours
    def test_ours_computes_while_it_receives(self):
        for name in ("GPipe", "1F1B"):
            with self.subTest(name):
                row = self.rows(name, "--ranks", 3, "--microbatches", 8, "--lowered")[1]
                actions = [reference._Action.from_str(cell) for cell in row]
                for microbatch in range(1, 8):
                    for receive, use in (("1RECV_F", "1F"), ("1RECV_B", "1B")):
                        posted, used = row.index(f"{receive}{microbatch}"), row.index(f"{use}{microbatch}")
                        computed = [action for action in actions[posted:used] if action.is_compute_op]
                        self.assertTrue(computed, f"{use}{microbatch} in {row}")


class DeferredReceives(FaultTest):
    """Not in the list: with defer_pp_recv=True receives are not in the order of the sends, and as messages have no tag, a
    stage receives the tensor of another one. On gloo, gradients of ZBVZeroBubble on 2 ranks with 4 microbatches are wrong
    by up to 0.3, without an error."""

    def receives_in_order(self, name, ranks, microbatches, **options):
        lowered = construct(name, ranks, 2, microbatches, **options).pipeline_order_with_comms
        runner = Runner([lowered[rank] for rank in range(ranks)], 2 * ranks, microbatches)
        runner.run()
        return runner.receives_in_order()

    def test_the_reference_receives_in_another_order_than_it_sends(self):
        for name, ranks, microbatches in (("InterleavedZeroBubble", 2, 4), ("ZBVZeroBubble", 2, 4), ("DualPipeV", 3, 6)):
            with self.subTest(name):
                self.assertTrue(self.receives_in_order(name, ranks, microbatches))
                self.assertFalse(self.receives_in_order(name, ranks, microbatches, defer_pp_recv=True))


class MergedBackwards(FaultTest):
    """[39] Ours is the pass `merge_backwards`, which has no command."""

    def test_the_reference_never_merges_backwards(self):
        for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            with self.subTest(name), mock.patch.object(reference, "_merge_bw", wraps=reference._merge_bw) as merge:
                schedule = construct(name, 4, 2, 16)
                merge.assert_not_called()
                runs = [
                    [action for action in schedule.pipeline_order_with_comms[rank] if action.is_compute_op]
                    for rank in range(4)
                ]
                self.assertLess(sum(len(reference._merge_bw(list(actions))) for actions in runs), sum(map(len, runs)))


class Prefetch(FaultTest):
    """[44] Ours is `LowerOptions::max_active_stages`, which has no command-line option."""

    def test_the_reference_always_gathers_three_stages_ahead(self):
        for makes in (*MULTI_STAGE.values(), reference._PipelineScheduleRuntime._prepare_schedule_with_comms):
            self.assertNotIn("max_active_stages", inspect.signature(makes).parameters)
        with mock.patch.object(reference, "_add_unshard_reshard", wraps=reference._add_unshard_reshard) as add:
            construct("LoopedBFS", 1, 6, 2)
        self.assertEqual(add.call_args.kwargs, {})
        self.assertEqual(inspect.signature(reference._add_unshard_reshard).parameters["max_active_stages"].default, 3)


class RefusedNumbers(FaultTest):
    """Limits rather than faults: numbers of microbatches that PyTorch does not support."""

    CASES = (("1F1B", 8, 3), ("Interleaved1F1B", 4, 9), ("InterleavedZeroBubble", 4, 13), ("DualPipeV", 4, 6))

    def test_the_reference_refuses_them(self):
        for name, ranks, microbatches in self.CASES:
            with self.subTest(name), self.assertRaises(ValueError):
                if name == "1F1B":
                    construct_single_stage(name, 0, ranks, microbatches)
                else:
                    construct(name, ranks, 2, microbatches)

    @ours
    def test_ours_makes_them(self):
        for name, ranks, microbatches in self.CASES:
            with self.subTest(name):
                self.penstock("verify", name, "--ranks", ranks, "--microbatches", microbatches)


if __name__ == "__main__":
    unittest.main()
