// Measured and predicted peak memory of the ranks of a training run.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/runtime/record.h"
#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/optimizer.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

// Peak memory of a rank, in bytes.
struct RankMemory {
  std::int64_t measured = 0;
  // 0 on devices, whose memory is not predicted.
  std::int64_t predicted = 0;
};

// Determines the memory of a training run, besides its stages and its schedule.
struct MeasuredRun {
  // This process's record of the last step, or null.
  const Record* last = nullptr;
  OptimizerOptions optimizer = {};
  bool sharded = false;
  // True if a step adds the gradients of several batches.
  bool accumulates = false;
};

// Sets the sizes of a cost model to those of the first replica's stages, as measured so far, with estimates for
// recomputations and for the state of the optimizer where there was none. A collective: all processes call it.
void add_sizes(Costs& costs, const Schedule& schedule, const TrainedStages& trained, const MemoryWatch& watch,
               const TrainingProcesses& processes, const MeasuredRun& run);

// Returns the measured memory of the first replica's ranks, and the one that is predicted from the sizes of `costs`. A
// collective.
std::vector<RankMemory> memory_of_ranks(const Schedule& schedule, const Costs& costs, const TrainedStages& trained,
                                        const MemoryWatch& watch, const TrainingProcesses& processes);

}  // namespace penstock::internal
