// Predicts the memory of ranks: from a schedule and the sizes of a cost model, how much each rank needs, and when.
//
//   double bytes = peak_bytes(schedule, costs, /*rank=*/0);
//   const std::vector<MemoryStep> memory = memory_over_time(schedule, simulate(schedule, costs), costs, /*rank=*/0);
#pragma once

#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"

namespace penstock {

struct Timeline;

// Memory of a rank from a point in time to the next step.
struct MemoryStep {
  double time = 0;
  double bytes = 0;

  friend bool operator==(const MemoryStep&, const MemoryStep&) = default;
};

// The memory of a rank, by the sizes of a cost model, is the sum of:
//   - all the time: parameters and optimizer state of its stages, its buffers, and the buffers of received messages,
//     which are reused for later messages;
//   - the gradients from before the step to which it adds;
//   - what it saves for its backwards: see SavedActivations;
//   - the gradients of a stage, from its first weight gradient on. Of a sharded stage these are full gradients until
//     REDUCE_GRAD, which copies them to a buffer that stays with their shard;
//   - the full parameters of a sharded stage, from UNSHARD to RESHARD, and twice while UNSHARD gathers them;
//   - messages that it has sent, up to RankCosts::sent_bytes, until the end of the step;
//   - the temporary memory of a computation while it runs.
// After the actions it steps the optimizers, which have temporary memory too.

// Returns the bytes that a rank has in memory all the time.
double static_bytes(const Schedule& schedule, const Costs& costs, int rank);
// Returns the peak memory of a rank in bytes, the optimizer step included.
double peak_bytes(const Schedule& schedule, const Costs& costs, int rank);
// Returns a rank's memory over time, without the optimizer step, on a timeline of the schedule. The first step is at
// time 0.
std::vector<MemoryStep> memory_over_time(const Schedule& schedule, const Timeline& timeline, const Costs& costs,
                                         int rank);

}  // namespace penstock
