// The stages of this process with their optimizers, and the threads that work on them between pipeline steps.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/runtime/rank_threads.h"
#include "penstock/stage/saved_state.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/optimizer.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

struct TrainedStage {
  // Position in TrainedStages.
  std::size_t index = 0;
  // Replica among those of all processes, and among those of this process.
  int replica = 0;
  int local_replica = 0;
  int rank = 0;
  // Owned by the pipeline.
  const PipelineStage* stage = nullptr;
  Optimizer optimizer;
};

// Number of parameters of a stage, and of their elements without sharding.
struct StageSize {
  std::int64_t parameters = 0;
  std::int64_t elements = 0;
};

class TrainedStages {
 public:
  // The pipeline and `memory` outlive this.
  TrainedStages(const Pipeline& pipeline, const OptimizerOptions& optimizer, const TrainingProcesses& processes,
                MemoryWatch& memory, int intra_op_threads);

  std::size_t size() const { return stages_.size(); }
  auto begin() { return stages_.begin(); }
  auto end() { return stages_.end(); }
  auto begin() const { return stages_.begin(); }
  auto end() const { return stages_.end(); }

  // Calls `act` for every stage, with the ranks in parallel: the calling thread runs the first rank, and a thread of
  // its own each other rank. Blocks until all have returned, and rethrows the exception of the lowest rank that failed.
  // All threads append their work on devices to the calling thread's current streams, and do not wait for it.
  void for_each_in_parallel(const std::function<void(TrainedStage&)>& act);

  // Steps the optimizers of all stages and releases the gradients.
  void step_optimizers(double learning_rate);

  // Returns a copy of the values of all buffers. Their version counters do not show whether they changed, because batch
  // normalisation updates its running statistics without incrementing them.
  SavedState save_written_tensors() const;

  // Returns the sizes of the first replica's stages, indexed by stage. A collective: all processes call it.
  std::vector<StageSize> sizes(const TrainingProcesses& processes) const;

 private:
  void run_rank(std::size_t index, const std::vector<c10::Stream>& streams,
                const std::function<void(TrainedStage&)>& act);

  MemoryWatch& memory_;
  int num_stages_;
  int intra_op_threads_;
  std::vector<TrainedStage> stages_;
  // Devices with streams, each once.
  std::vector<at::Device> devices_;
  // Stages of each local rank, ordered by replica and rank.
  std::vector<std::vector<TrainedStage*>> by_rank_;
  // One thread for each local rank but the first; null if there is one local rank.
  std::unique_ptr<RankThreads> threads_;
};

}  // namespace penstock::internal
