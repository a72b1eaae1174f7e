// Measured and predicted peak memory of the ranks of a training run.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/runtime/record.h"
#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/memory_prediction.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

// Peak memory of a rank, in bytes.
struct RankMemory {
  std::int64_t measured = 0;
  std::int64_t predicted = 0;
};

// Returns the memory of the first replica's stages, as measured so far, with estimates for the halves of a backward and
// for recomputations where there were none. `last` is this process's record of the last step, or null. A collective: all processes call it.
std::vector<StageMemory> memory_of_stages(const Schedule& schedule, const TrainedStages& trained,
                                          const MemoryWatch& watch, const TrainingProcesses& processes,
                                          const Record* last, bool sharded);
// Returns the measured memory of the first replica's ranks, and the one predicted from that of their stages. A
// collective.
std::vector<RankMemory> memory_of_ranks(const Schedule& schedule, const std::vector<StageMemory>& stages,
                                        const TrainedStages& trained, const MemoryWatch& watch,
                                        const TrainingProcesses& processes);

// Sets the sizes of a cost model to those of the stages. The temporary memory of a rank's computations counts as its
// buffers.
void add_sizes(Costs& costs, const Schedule& schedule, const std::vector<StageMemory>& stages);

}  // namespace penstock::internal
