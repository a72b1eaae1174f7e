"""Loads schedules that Penstock wrote into the installed torch.distributed.pipelining.

    load_csv.py DIR [--in-order]

DIR has NAME-RANKS-STAGES_PER_RANK-MICROBATCHES.compute.csv, which PyTorch loads, lowers, and writes again as
NAME-RANKS-STAGES_PER_RANK-MICROBATCHES.reference.csv (with CRLF line ends, as its CSV writer does), and .lowered.csv, which
it loads unchanged. It hardly validates the latter, and its simulator supports neither sharding nor reductions nor pairs, so
they are simulated here.

PyTorch gets the placement from the file, V-shaped or not; the numbers of stages and microbatches are those of the file
name. It refuses schedules of forwards only, so there are none.

Messages of PyTorch have no tag: a rank receives messages from another rank in the order in which they were sent. A lowered
schedule that receives in another order loads, but PyTorch would compute wrong results with it. Such files are counted, and
with --in-order they are failures.
"""

import argparse
import pathlib
import sys
from collections import Counter, defaultdict

from schedules import REFUSALS, reference, stand_ins


class InvalidSchedule(Exception):
    """Raised for a lowered schedule that is not valid."""


def parts_of(action):
    return action.sub_actions if action.sub_actions is not None else (action,)


def sender_of(receive):
    """Returns the SEND of a RECV."""
    forwards = receive.computation_type == reference.RECV_F
    return reference._Action(
        receive.stage_index - 1 if forwards else receive.stage_index + 1,
        reference.SEND_F if forwards else reference.SEND_B,
        receive.microbatch_index,
    )


class Runner:
    """Simulates all ranks: a receive is only posted, a send needs only the value that it sends, and a computation waits for
    values from other ranks. A value of the same rank that is missing is an error."""

    def __init__(self, lists, stages, microbatches):
        # The parts of a pair run in turn.
        self.lists = [[part for action in actions for part in parts_of(action)] for actions in lists]
        self.stages = stages
        self.microbatches = microbatches
        self.rank_of = {part.stage_index: rank for rank, parts in enumerate(self.lists) for part in parts}
        self.sharded = any(part.computation_type == reference.UNSHARD for parts in self.lists for part in parts)
        self.done = set()
        self.gathered = set()
        self.weight_gradients = Counter()

    def run(self):
        positions = [0] * len(self.lists)
        moved = True
        while moved:
            moved = False
            for rank, parts in enumerate(self.lists):
                while positions[rank] < len(parts):
                    part = parts[positions[rank]]
                    try:
                        if not self.take(part):
                            break
                    except InvalidSchedule as error:
                        raise InvalidSchedule(f"rank {rank}, action {positions[rank]}, {part}: {error}") from None
                    positions[rank] += 1
                    moved = True
        stuck = [
            f"rank {rank} at action {position}, {parts[position]}"
            for rank, (parts, position) in enumerate(zip(self.lists, positions))
            if position < len(parts)
        ]
        if stuck:
            raise InvalidSchedule("it deadlocks: " + ", ".join(stuck))
        self.require_complete()

    def take(self, part):
        """Executes the action, or returns False if it has to wait."""
        kind = part.computation_type
        if part in self.done and kind not in (reference.UNSHARD, reference.RESHARD):
            raise InvalidSchedule("it is a duplicate")
        if kind in (reference.SEND_F, reference.SEND_B):
            self.require_sent_is_made(part)
        elif kind in (reference.UNSHARD, reference.RESHARD):
            if (kind == reference.UNSHARD) == (part.stage_index in self.gathered):
                raise InvalidSchedule(f"stage {part.stage_index} is that already")
            self.gathered ^= {part.stage_index}
        elif kind == reference.REDUCE_GRAD:
            if self.weight_gradients[part.stage_index] != self.microbatches:
                raise InvalidSchedule(f"{self.weight_gradients[part.stage_index]} of {self.microbatches} weight gradients are made")
        elif kind in (reference.F, reference.I, reference.W, reference.B):
            if self.sharded and part.stage_index not in self.gathered:
                raise InvalidSchedule("its stage is sharded")
            if not self.inputs_are_there(part):
                return False
            self.weight_gradients[part.stage_index] += kind in (reference.W, reference.B)
        self.done.add(part)
        return True

    def inputs_are_there(self, part):
        stage, kind, microbatch, _ = part
        if kind == reference.F:
            return stage == 0 or self.arrived(part, stage - 1, (reference.F,), reference.RECV_F)
        own = reference.I if kind == reference.W else reference.F
        if reference._Action(stage, own, microbatch) not in self.done:
            raise InvalidSchedule(f"it comes before {reference._Action(stage, own, microbatch)}")
        if kind == reference.W or stage == self.stages - 1:
            return True
        return self.arrived(part, stage + 1, (reference.I, reference.B), reference.RECV_B)

    def arrived(self, part, source, makers, receive):
        if self.rank_of[source] == self.rank_of[part.stage_index]:
            if not any(reference._Action(source, maker, part.microbatch_index) in self.done for maker in makers):
                raise InvalidSchedule(f"stage {source} of the same rank has not made its input")
            return True
        posted = reference._Action(part.stage_index, receive, part.microbatch_index)
        if posted not in self.done:
            raise InvalidSchedule(f"there is no {posted} before it")
        return sender_of(posted) in self.done

    def require_sent_is_made(self, send):
        makers = (reference.F,) if send.computation_type == reference.SEND_F else (reference.I, reference.B)
        if not any(reference._Action(send.stage_index, maker, send.microbatch_index) in self.done for maker in makers):
            raise InvalidSchedule("it sends what has not been made")

    def require_complete(self):
        if self.gathered:
            raise InvalidSchedule(f"stages {sorted(self.gathered)} stay gathered")
        received = {sender_of(part) for part in self.done if part.computation_type in (reference.RECV_F, reference.RECV_B)}
        sent = {part for part in self.done if part.computation_type in (reference.SEND_F, reference.SEND_B)}
        if received != sent:
            raise InvalidSchedule(f"sent and never received, or the other way round: {sorted(map(str, received ^ sent))}")

    def receives_in_order(self):
        """Returns True if messages between any two ranks are received in the order in which they are sent."""
        sent = defaultdict(list)
        received = defaultdict(list)
        for rank, parts in enumerate(self.lists):
            for part in parts:
                kind = part.computation_type
                if kind in (reference.SEND_F, reference.SEND_B):
                    to_stage = part.stage_index + (1 if kind == reference.SEND_F else -1)
                    sent[rank, self.rank_of[to_stage]].append(part)
                elif kind in (reference.RECV_F, reference.RECV_B):
                    send = sender_of(part)
                    received[self.rank_of[send.stage_index], rank].append(send)
        return sent == received


def load(path, form):
    name, ranks, stages_per_rank, microbatches = path.name.split(".")[0].rsplit("-", 3)
    ranks, stages_per_rank, microbatches = int(ranks), int(stages_per_rank), int(microbatches)
    runtime = reference._PipelineScheduleRuntime(stand_ins(ranks, stages_per_rank), microbatches)
    runtime._load_csv(str(path), format=form)
    return runtime


def wrong_notes():
    """Returns what `penstock schedule export` says of Penstock's own actions that is not true."""
    wrong = []
    for text in ("0R0", "0SUM_SHARED"):
        try:
            wrong.append(f"{text} is not refused, but read as {reference._Action.from_str(text)}")
        except RuntimeError:
            pass
    misread = str(reference._Action.from_str("1SEND_F0@3"))
    return wrong if misread == "1SEND_F0" else [*wrong, f"1SEND_F0@3 is read as {misread}"]


def main():
    arguments = argparse.ArgumentParser(description="Loads schedules of Penstock into the installed PyTorch.")
    arguments.add_argument("directory", metavar="DIR", type=pathlib.Path)
    arguments.add_argument("--in-order", action="store_true", help="fail where PyTorch would mix up messages")
    options = arguments.parse_args()

    loaded = Counter()
    out_of_order = []
    failures = wrong_notes()
    for path in sorted(options.directory.glob("*.csv")):
        form = {".compute": "compute_only", ".lowered": "compute_comms"}.get(pathlib.Path(path.stem).suffix)
        if form is None:
            continue
        try:
            runtime = load(path, form)
            if form == "compute_only":
                again = path.with_name(path.name.replace(".compute.csv", ".reference.csv"))
                runtime._dump_csv(str(again), format="compute_only")
            else:
                lists = [runtime.pipeline_order_with_comms[rank] for rank in range(runtime.pp_group_size)]
                runner = Runner(lists, runtime._num_stages, runtime._n_microbatches)
                runner.run()
                if not runner.receives_in_order():
                    out_of_order.append(path.name)
        except (*REFUSALS, LookupError, InvalidSchedule) as error:
            failures.append(f"{path}: {type(error).__name__}: {error}")
        loaded[form] += 1

    if options.in_order:
        failures += [f"{name}: receives in another order than is sent between two ranks" for name in out_of_order]
    for form, suffix in (("compute_only", ".compute.csv"), ("compute_comms", ".lowered.csv")):
        if not loaded[form]:
            failures.append(f"{options.directory}: contains no *{suffix}.")
    print(
        f"{loaded['compute_only']} compute and {loaded['compute_comms']} lowered schedules, {len(failures)} failures; "
        f"{len(out_of_order)} lowered ones receive in another order than is sent"
    )
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
