"""Writes schedules of the installed torch.distributed.pipelining to files, which the tests compare with Penstock's.

    schedules.py OUTDIR [--seed N]

The files are made when the tests run, by the installed version; none are in the repository. A file is a sequence of
records. A record is a line that starts with `case`, followed in most files by a CSV row for each rank:

    orders.txt     case NAME RANKS STAGES_PER_RANK MICROBATCHES accepted    the computations in the order of execution
                   case NAME RANKS STAGES_PER_RANK MICROBATCHES refused     no rows: PyTorch's constructor raises
    lowered.txt    case NAME RANKS STAGES_PER_RANK MICROBATCHES eager       all actions of a rank, receives as early as
                   case NAME RANKS STAGES_PER_RANK MICROBATCHES deferred    possible, or with defer_pp_recv=True
    sharding.txt   case NAME RANKS STAGES_PER_RANK MICROBATCHES MAX_ACTIVE  UNSHARD and RESHARD added, nothing else
    merged.txt     case NAME RANKS STAGES_PER_RANK MICROBATCHES             adjacent I and W as one B

The rows show which stage is on which rank.
"""

import argparse
import contextlib
import os
import random
import sys
import types
import warnings
from collections import Counter

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from torch.distributed.pipelining import schedules as reference

SINGLE_STAGE = {
    "ForwardOnly": reference._ScheduleForwardOnly,
    "GPipe": reference.ScheduleGPipe,
    "1F1B": reference.Schedule1F1B,
}
MULTI_STAGE = {
    "LoopedBFS": reference.ScheduleLoopedBFS,
    "Interleaved1F1B": reference.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": reference.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": reference.ScheduleZBVZeroBubble,
    "DualPipeV": reference.ScheduleDualPipeV,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Exceptions with which its constructors refuse arguments. Any other means that a stand-in no longer fits, and ends the
# script.
REFUSALS = (ValueError, AssertionError, RuntimeError)


def stages_per_rank(name, most):
    if name in SINGLE_STAGE:
        return range(1, 2)
    if name in V_SHAPED:
        return range(2, 3)
    return range(1, most + 1)


def stand_ins(ranks, stages_per_rank):
    """Returns stand-ins for the stages of rank 0, with the attributes that a constructor reads. Every rank makes the actions
    of all ranks."""
    return [
        types.SimpleNamespace(num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]


class RecordingStage:
    """A stage that records its actions, and neither computes nor communicates."""

    def __init__(self, index, count):
        self.stage_index = index
        self.num_stages = self.group_size = count
        self.group_rank = index
        self.is_first = index == 0
        self.is_last = index == count - 1
        self.has_backward = True
        self.submod = None
        self.ran = []

    def forward_one_chunk(self, microbatch, args, kwargs, save_forward_output=True):
        self.ran.append(reference._Action(self.stage_index, reference.F, microbatch))

    def backward_one_chunk(self, microbatch, loss=None, full_backward=True, last_backward=False):
        self.ran.append(reference._Action(self.stage_index, reference.B if full_backward else reference.I, microbatch))

    def backward_weight_one_chunk(self, microbatch, last_backward=False):
        self.ran.append(reference._Action(self.stage_index, reference.W, microbatch))

    def no_messages(self, microbatch):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_messages

    def perform_reduce_grad(self, scale):
        pass


def construct_single_stage(name, rank, ranks, microbatches):
    loss = None if name == "ForwardOnly" else lambda output, target: 0.0
    return SINGLE_STAGE[name](RecordingStage(rank, ranks), microbatches, loss_fn=loss)


def run_single_stage(schedules, microbatches):
    """Runs the loop of each rank and returns the recorded computations. These schedules do not execute their pipeline_order,
    which is only drawn, and is wrong for the last rank of 1F1B (faults.py)."""
    lists = []
    for schedule in schedules:
        training = schedule._loss_fn is not None
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches(
            arg_mbs=[()] * microbatches,
            kwarg_mbs=[{}] * microbatches,
            target_mbs=[0.0] * microbatches if training else None,
        )
        lists.append(schedule._stage.ran)
    return lists


def construct(name, ranks, stages_per_rank, microbatches, **options):
    return MULTI_STAGE[name](stand_ins(ranks, stages_per_rank), microbatches, **options)


def computations(schedule):
    """Returns pipeline_order without idle slots. PyTorch executes pipeline_order_with_comms, which must have the same
    computations for the passes below to start from pipeline_order."""
    lists = []
    for rank in range(schedule.pp_group_size):
        ordered = [action for action in schedule.pipeline_order[rank] if action is not None]
        runs = [action for action in schedule.pipeline_order_with_comms[rank] if action.is_compute_op]
        if ordered != runs:
            raise SystemExit(f"{type(schedule).__name__}, rank {rank}: PyTorch orders {ordered} and runs {runs}.")
        lists.append(ordered)
    return lists


def order_of(name, ranks, stages_per_rank, microbatches):
    """Returns the computations of each rank, or None if PyTorch refuses."""
    try:
        if name in SINGLE_STAGE:
            constructed = [construct_single_stage(name, rank, ranks, microbatches) for rank in range(ranks)]
        else:
            constructed = construct(name, ranks, stages_per_rank, microbatches)
    except REFUSALS:
        return None
    return run_single_stage(constructed, microbatches) if name in SINGLE_STAGE else computations(constructed)


@contextlib.contextmanager
def atomic_file(directory, name):
    """Opens a file that gets its name only when it is complete."""
    temporary = os.path.join(directory, f"{name}.{os.getpid()}.part")
    try:
        with open(temporary, "w") as file:
            yield file
        os.replace(temporary, os.path.join(directory, name))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def write_case(file, case, lists=()):
    print("case", *case, file=file)
    for actions in lists:
        print(",".join(map(str, actions)), file=file)


def write_orders(file, seed):
    """Writes every small case, and random large ones until PyTorch has accepted eight of each schedule. Returns the actions
    of the small cases, and the numbers of accepted and refused cases."""
    orders = {}
    tally = Counter()

    def write(case):
        lists = order_of(*case)
        answer = "refused" if lists is None else "accepted"
        tally[case[0], answer] += 1
        write_case(file, (*case, answer), lists or ())
        return lists

    names = [*SINGLE_STAGE, *MULTI_STAGE]
    for name in names:
        for ranks in range(1, 9):
            for local in stages_per_rank(name, 4):
                for microbatches in range(1, 17):
                    case = (name, ranks, local, microbatches)
                    lists = write(case)
                    if lists is not None:
                        orders[case] = lists

    draw = random.Random(seed)
    for name in names:
        accepted = 0
        drawn = set()
        while accepted < 8:
            case = (name, draw.randint(2, 16), draw.choice(stages_per_rank(name, 6)), draw.randint(17, 64))
            if case not in drawn:
                drawn.add(case)
                accepted += write(case) is not None
            if len(drawn) == 200:
                raise SystemExit(f"{name}: PyTorch accepts {accepted} of 200 random cases, which is too few to be true.")
    return orders, tally


def write_lowered(file):
    count = 0
    for name in MULTI_STAGE:
        for ranks in range(1, 7):
            for local in stages_per_rank(name, 3):
                for microbatches in (1, 2, 3, 4, 6, 8, 12, 16):
                    for placement in ("eager", "deferred"):
                        try:
                            schedule = construct(
                                name, ranks, local, microbatches, defer_pp_recv=placement == "deferred"
                            )
                        except REFUSALS:
                            continue
                        lists = schedule.pipeline_order_with_comms
                        case = (name, ranks, local, microbatches, placement)
                        write_case(file, case, [lists[rank] for rank in range(ranks)])
                        count += 1
    return count


def write_sharding(file):
    """Writes schedules with sharding. PyTorch reshards in the iteration order of a Python set, which is unspecified. That is
    visible only if two stages are resharded at once, which needs a pair that is followed by no computation of either of its
    stages. None of its schedules has that; the check fails if one ever does."""
    count = 0
    for name in MULTI_STAGE:
        for ranks, microbatches in ((1, 3), (2, 4), (3, 6), (4, 8)):
            for local in stages_per_rank(name, 6):
                lists = order_of(name, ranks, local, microbatches)
                if lists is None:
                    continue
                for most in range(1, 6):
                    sharded = [reference._add_unshard_reshard(actions, max_active_stages=most) for actions in lists]
                    case = (name, ranks, local, microbatches, most)
                    for actions in sharded:
                        for action, following in zip(actions, actions[1:]):
                            if action.computation_type == following.computation_type == reference.RESHARD:
                                raise SystemExit(f"sharding of {case}: the order of {action} and {following} is unspecified.")
                    write_case(file, case, sharded)
                    count += 1
    return count


def write_merged(file, orders):
    count = 0
    for case, lists in orders.items():
        if case[0] in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            # _merge_bw empties its argument.
            write_case(file, case, [reference._merge_bw(list(actions)) for actions in lists])
            count += 1
    return count


def main():
    arguments = argparse.ArgumentParser(description="Writes schedules of the installed PyTorch for the tests.")
    arguments.add_argument("directory", metavar="OUTDIR")
    arguments.add_argument("--seed", type=int, default=1, help="seed of the large random cases (default: %(default)s)")
    options = arguments.parse_args()
    os.makedirs(options.directory, exist_ok=True)

    counts = {}
    with atomic_file(options.directory, "orders.txt") as file:
        orders, tally = write_orders(file, options.seed)
    with atomic_file(options.directory, "lowered.txt") as file:
        counts["lowered"] = write_lowered(file)
    with atomic_file(options.directory, "sharding.txt") as file:
        counts["sharding"] = write_sharding(file)
    with atomic_file(options.directory, "merged.txt") as file:
        counts["merged"] = write_merged(file, orders)

    answers = ", ".join(
        f"{name} {tally[name, 'accepted']}/{tally[name, 'refused']}" for name in (*SINGLE_STAGE, *MULTI_STAGE)
    )
    others = ", ".join(f"{count} {name}" for name, count in counts.items())
    print(f"seed {options.seed}; accepted/refused: {answers}; {others}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
