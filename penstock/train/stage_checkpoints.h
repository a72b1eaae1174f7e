// Saves the stages of all processes as one checkpoint, and loads them from one. Shards are gathered when they are saved
// and cut again when they are loaded, so a checkpoint does not depend on ranks, stages or sharding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "penstock/device/transfer.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/checkpoint_info.h"
#include "penstock/train/checkpoint_save.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/model.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

// A checkpoint that is complete on disk.
struct SavedCheckpoint {
  std::int64_t step = 0;
  std::string path;
};

class StageCheckpoints {
 public:
  // All arguments outlive this. `sharded` is TrainerOptions::sharded.
  StageCheckpoints(const Schedule& schedule, const Model& model, TrainedStages& stages,
                   const TrainingProcesses& processes, MemoryWatch& memory, bool sharded);

  // Begins a checkpoint in a directory. `info` has the step, the run and the configuration; the rest is filled in. Of
  // the run's checkpoints the last `keep` remain. If the stages are on devices, the checkpoint is copied and written
  // beside the steps that follow, and holds what the stages have now; otherwise finish() has to be called before the
  // next step. There must be none in flight.
  void start(const std::string& directory, int keep, CheckpointInfo info);
  // Advances the checkpoint in flight, if there is one, without waiting for files. Call it after each step. Returns the
  // checkpoint when it is on disk. A collective: throws CheckpointError on all processes if one of them cannot write its
  // part, or has a parameter that is not finite. There is no checkpoint in flight then.
  std::optional<SavedCheckpoint> poll();
  // Blocks until the checkpoint in flight, if there is one, is on disk, and returns it. A collective, as poll().
  std::optional<SavedCheckpoint> finish();
  // Completes the checkpoint in flight when the processes no longer perform the same collectives: see
  // CheckpointSave::finish_after_failure.
  std::optional<SavedCheckpoint> finish_after_failure();

  // Make later work of the calling thread's current streams wait for the copies of a checkpoint in flight. The first
  // has to be called before forwards, the second before optimizers.
  void block_forwards() const;
  void block_updates() const;

  // Loads parameters, buffers and optimizer state. Throws CheckpointError before anything is changed.
  void load(const Checkpoint& checkpoint);

  // Returns the estimated size of a checkpoint: parameters, buffers and the state that the optimizer will have. A
  // collective.
  std::int64_t estimate_bytes(const OptimizerOptions& optimizer) const;

 private:
  // Calls `act` for the checkpoint in flight, which returns true if it is on disk, and releases one that has ended.
  std::optional<SavedCheckpoint> advance(const std::function<bool(CheckpointSave&)>& act);
  // Returns what a stage stores of a tensor of the checkpoint: a copy in host memory, or the shard of its replica.
  static at::Tensor stored_part(const TrainedStage& stage, const std::string& name, const at::Tensor& whole);

  TrainedStages& stages_;
  MemoryWatch& memory_;
  CheckpointSource source_;
  // Streams of the copies of all checkpoints.
  CopyStreams streams_;
  // The checkpoint in flight, or null.
  std::unique_ptr<CheckpointSave> in_flight_;
};

}  // namespace penstock::internal
