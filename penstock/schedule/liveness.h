// Computes which activations each rank saves for its backwards, and from which action to which: from the schedule alone,
// without times; and with the sizes of a cost model, how much memory each rank needs.
//
//   for (const SavedActivations& saved : activation_liveness(schedule, /*rank=*/0)) {
//     std::cout << saved.stage << " " << saved.microbatch << ": " << saved.begin.action << " to " << saved.end.action;
//   }
//   const std::vector<MemoryStep> memory = memory_over_time(schedule, timeline, costs, /*rank=*/0);
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"

namespace penstock {

struct Timeline;

// Place of a computation in a rank's actions.
struct ActionPlace {
  std::size_t action = 0;
  // True for the second part of a pair.
  bool second_part = false;

  friend auto operator<=>(const ActionPlace&, const ActionPlace&) = default;
};

// Memory that a rank saves for the backward of one stage and microbatch, during some of its actions.
struct SavedActivations {
  enum class Kind : std::uint8_t {
    // Inputs of a forward that will be recomputed: from the start of F to the start of R.
    Inputs,
    // All that the backward needs: from the start of F, or of R, to the end of I or B.
    Activations,
    // The part that the weight gradient alone needs: from the end of I to the end of W.
    WeightInputs,
  };

  int stage = 0;
  int microbatch = 0;
  Kind kind = Kind::Activations;
  // The computations at which it begins and ends: see Kind.
  ActionPlace begin;
  ActionPlace end;

  friend bool operator==(const SavedActivations&, const SavedActivations&) = default;
};

// Returns what a rank saves, in the order of the places where it begins. In a schedule without backwards, a forward has
// its activations in memory while it runs. Requires a schedule that verify_each_list accepts.
std::vector<SavedActivations> activation_liveness(const Schedule& schedule, int rank);

// Memory of a rank from a point in time to the next step.
struct MemoryStep {
  double time = 0;
  double bytes = 0;

  friend bool operator==(const MemoryStep&, const MemoryStep&) = default;
};

// Returns the largest number of microbatches whose activations a rank saves at a time. Those of which only inputs are
// saved, for a recomputation, do not count.
int peak_activations(const Schedule& schedule, int rank);

// The memory of a rank, by the sizes of a cost model, is the sum of:
//   - all the time: parameters and optimizer state of its stages, its buffers, and the buffers of received messages,
//     which are reused for later messages;
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
