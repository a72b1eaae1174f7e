// Passes: pure functions from schedule to schedule. `lower` runs those that turn computations into what a rank
// executes. Those that add actions throw ScheduleError, with the explanation, when a list is not as it should be.
#pragma once

#include "penstock/schedule/schedule.h"

namespace penstock {

// Evaluation: the forwards, without all that backwards bring. A lowered schedule stays lowered.
Schedule drop_backwards(const Schedule& schedule);

// An I and the W of the same stage and microbatch right behind it become one B. One pass of the kernels instead of two,
// but the gradient of the input leaves later.
Schedule merge_backwards(const Schedule& schedule);

// UNSHARD before a stage's computations and RESHARD after them, with at most `max_active_stages` stages of a rank
// gathered: those that it computes next, so that gathering runs ahead.
Schedule add_sharding(const Schedule& schedule, int max_active_stages = 3);

// REDUCE_GRAD after each stage's last weight gradient; at the end of each list SUM_SHARED for its groups of stages that
// share parameters, in the same order everywhere, so that nobody waits in a meeting with work to do.
Schedule add_reductions(Schedule schedule);
// A schedule without REDUCE_GRAD and SUM_SHARED, for all steps of an accumulation but the last.
Schedule drop_reductions(const Schedule& schedule);

// SEND and RECV for every edge between stages on different ranks. Sends follow at once what they send. Receives are
// posted ahead, as many an edge as are in flight and one more, so that the next message moves while this one is used; and
// between two ranks in the order of sending.
Schedule add_communication(const Schedule& schedule);

// The first microbatches, or the first stages with the edges and groups among them, of a schedule without communication.
Schedule keep_microbatches(Schedule schedule, int microbatches);
Schedule keep_stages(Schedule schedule, int stages);

// A schedule of computations moved to another placement of as many stages: each rank runs its stages' actions in the
// order in which they would start with all costs 1. Pairs are taken apart.
Schedule place(const Schedule& schedule, const Placement& placement);

struct LowerOptions {
  bool sharding = true;
  int max_active_stages = 3;
  bool reductions = true;
};

// Adds what a schedule does not have yet of sharding, reductions and communication. Throws ScheduleError when it is not
// valid, or has messages already.
Schedule lower(const Schedule& schedule, const LowerOptions& options = {});

}  // namespace penstock
