// Passes are pure functions from schedule to schedule. `lower` runs those that turn computations into what a rank
// executes. Passes that add actions throw ScheduleError with an explanation if the schedule is not valid.
#pragma once

#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock {

// Returns the schedule for evaluation: the forwards, without backwards and everything that only backwards need. A
// lowered schedule stays lowered.
Schedule drop_backwards(const Schedule& schedule);

// Merges an I and the W of the same stage and microbatch into a B where they are adjacent. That saves kernels and
// launches, but the gradient of the input is sent later.
Schedule merge_backwards(const Schedule& schedule);

// Adds R directly before the backward of each microbatch of the given stages, where it has none. A microbatch whose
// backward follows its forward directly, or in the same pair, is not recomputed: nothing would be freed in between.
// Throws ScheduleError if the schedule has no such stage, or has messages already. Without `stages`, all are
// recomputed.
Schedule add_recomputation(const Schedule& schedule, const std::vector<int>& stages);
Schedule add_recomputation(const Schedule& schedule);

// Adds UNSHARD before a stage's computations and RESHARD after them. At most `max_active_stages` stages of a rank are
// gathered at a time: those that it computes next, so that gathering runs ahead.
Schedule add_sharding(const Schedule& schedule, int max_active_stages = 3);

// Adds REDUCE_GRAD after each stage's last weight gradient, and at the end of each rank's actions SUM_SHARED for its
// groups of stages that share parameters. All ranks sum in the same order, and no rank waits for a sum while it has
// work to do.
Schedule add_reductions(Schedule schedule);
// Removes REDUCE_GRAD and SUM_SHARED, for all steps of a gradient accumulation but the last.
Schedule drop_reductions(const Schedule& schedule);

// Adds SEND and RECV for every edge between stages on different ranks. A send directly follows the computation of what
// it sends. Receives are posted ahead: per edge one more than there are messages in flight, so that the next message is
// transferred while the current one is used; and between two ranks in the order of sending.
Schedule add_communication(const Schedule& schedule);

// Keep only the first microbatches, or the first stages with the edges and groups among them. The schedule must not
// contain messages.
Schedule keep_microbatches(Schedule schedule, int microbatches);
Schedule keep_stages(Schedule schedule, int stages);

// Moves a schedule of computations to another placement of the same number of stages. Each rank runs the actions of its
// stages in the order in which they would start if every computation took one unit of time. Pairs are split.
Schedule place(const Schedule& schedule, const Placement& placement);

struct LowerOptions {
  bool sharding = true;
  int max_active_stages = 3;
  bool reductions = true;
};

// Adds sharding, reductions and communication, as far as the schedule does not have them yet. Throws ScheduleError if
// the schedule is not valid or has messages already.
Schedule lower(const Schedule& schedule, const LowerOptions& options = {});

}  // namespace penstock
