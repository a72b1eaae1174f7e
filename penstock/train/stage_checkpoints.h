// Saves the stages of all processes as one checkpoint, and loads them from one. Shards are gathered when they are saved
// and cut again when they are loaded, so a checkpoint does not depend on ranks, stages or sharding.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/checkpoint_info.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/model.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

class StageCheckpoints {
 public:
  // All arguments outlive this. `sharded` is TrainerOptions::sharded.
  StageCheckpoints(const Schedule& schedule, const Model& model, TrainedStages& stages,
                   const TrainingProcesses& processes, MemoryWatch& memory, bool sharded);

  // Writes a checkpoint into a directory and returns its path. `info` has the step, the run and the configuration; the
  // rest is filled in. Of the run's checkpoints the last `keep` remain. A collective: throws CheckpointError on all
  // processes if one of them cannot write its part, or has a parameter that is not finite.
  std::string save(const std::string& directory, int keep, CheckpointInfo info) const;

  // Loads parameters, buffers and optimizer state. Throws CheckpointError before anything is changed.
  void load(const Checkpoint& checkpoint);

  // Returns the estimated size of a checkpoint: parameters, buffers and the state that the optimizer will have. A
  // collective.
  std::int64_t estimate_bytes(const OptimizerOptions& optimizer) const;

 private:
  // The tensors of a stage in host memory: the stage's own, or copies of those on a device.
  struct HostTensors {
    NamedTensors parameters;
    NamedTensors optimizer;
    NamedTensors buffers;
  };
  // Returns the tensors of all stages, indexed as TrainedStages. Copies them from all devices at the same time, and
  // waits once. Throws CheckpointError if a device does not answer within the timeout.
  std::vector<HostTensors> copy_to_host(const std::string& path) const;
  // Throws CheckpointError, which names the first parameter of this process that is not finite.
  void require_finite_parameters(const std::string& path, const std::vector<HostTensors>& on_host) const;
  // Returns tensors of a stage, parameters or optimizer state, without sharding and under all names that the model has
  // for them. With process ranks it is a collective of the processes that have the stage.
  NamedTensors unsharded(const TrainedStage& stage, const std::vector<HostTensors>& on_host,
                         NamedTensors HostTensors::* kind) const;
  // Concatenates the shards that the replicas of this process have of a tensor.
  at::Tensor local_shards(const TrainedStage& stage, const std::string& name, const std::vector<HostTensors>& on_host,
                          NamedTensors HostTensors::* kind) const;
  // Returns what a stage stores of a tensor of the checkpoint: a copy in host memory, or the shard of its replica.
  static at::Tensor stored_part(const TrainedStage& stage, const std::string& name, const at::Tensor& whole);

  const Schedule& schedule_;
  const Model& model_;
  TrainedStages& stages_;
  const TrainingProcesses& processes_;
  MemoryWatch& memory_;
  bool sharded_;
};

}  // namespace penstock::internal
