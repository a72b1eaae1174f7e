// Measured and predicted peak memory of the ranks of a training run.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/runtime/record.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

// Peak memory of a rank, in bytes.
struct RankMemory {
  std::int64_t measured = 0;
  std::int64_t predicted = 0;
};

// Returns the memory of the first replica's ranks. `last` is this process's record of the last step, or null. A
// collective: all processes call it.
std::vector<RankMemory> memory_of_ranks(const Schedule& schedule, const TrainedStages& trained,
                                        const MemoryWatch& watch, const TrainingProcesses& processes,
                                        const Record* last, bool sharded);

}  // namespace penstock::internal
