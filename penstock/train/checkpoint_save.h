// One checkpoint on its way to the disk: copies to the host, gathered shards, files.
//
//   CheckpointSave save(source, streams, "checkpoints", /*keep=*/3, info, StageSnapshot::Use::BesideTraining);
//   save.snapshot().block_updates();        // in the next step
//   while (!save.poll()) …                  // after each step, on all processes
//
// A checkpoint beside training is written by a thread of its own. The collectives that it needs are called by poll() and
// finish() alone, so that all processes perform them in the same order as those of the steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "penstock/base/deadline.h"
#include "penstock/schedule/schedule.h"
#include "penstock/tensor/named_tensors.h"
#include "penstock/train/checkpoint_info.h"
#include "penstock/train/checkpoint_writer.h"
#include "penstock/train/model.h"
#include "penstock/train/stage_snapshot.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

// Names what checkpoints are made of. All of it outlives them.
struct CheckpointSource {
  const Schedule& schedule;
  const Model& model;
  const TrainedStages& stages;
  const TrainingProcesses& processes;
  // TrainerOptions::sharded.
  bool sharded = false;
};

// All processes construct one, and call its collectives in the same order. A collective throws CheckpointError on all
// processes if one of them cannot write its part, or has a parameter that is not finite; no part of the checkpoint is
// left then. Used by one thread.
class CheckpointSave {
 public:
  // Starts the copies of the tensors. `info` has the step, the run and the configuration; the rest is filled in. Of the
  // run's checkpoints the last `keep` remain.
  CheckpointSave(const CheckpointSource& source, CopyStreams& streams, const std::string& directory, int keep,
                 CheckpointInfo info, StageSnapshot::Use use);
  // Joins the thread. A checkpoint that is not finished never appears under its name.
  ~CheckpointSave();
  CheckpointSave(const CheckpointSave&) = delete;
  CheckpointSave& operator=(const CheckpointSave&) = delete;

  const StageSnapshot& snapshot() const { return snapshot_; }
  std::int64_t step() const { return info_.step; }
  // Returns true if the checkpoint is on disk, or has been given up.
  bool has_ended() const { return state_ == State::Ended; }
  // Returns the path of the finished checkpoint.
  std::string path() const { return writer_.path(); }

  // Advances as far as it can without waiting for files: waits for the copies and gathers the shards in the first call,
  // and completes the checkpoint when all processes have written their parts. Returns true if it is on disk. A
  // collective.
  bool poll();
  // Blocks until the checkpoint is on disk. A collective.
  void finish();
  // Completes the checkpoint as far as that is possible without a collective, when the processes have failed and no
  // longer call the same members: with thread ranks, or if all parts are on disk. Returns true if it is on disk, and
  // otherwise leaves no part of it. Copies that have not ended at the deadline are given up.
  bool finish_after_failure(Deadline copied) noexcept;

 private:
  enum class State {
    // Tensors are being copied to the host.
    Copying,
    // This process's parts are being written, or have been.
    Writing,
    // The checkpoint is on disk, or is given up.
    Ended,
  };
  // The tensors of a rank.
  struct Part {
    NamedTensors weights;
    NamedTensors optimizer;
  };

  // Runs one phase on all processes, and throws on all if it throws on one. A collective.
  void run_phase(const std::function<void()>& act);
  // Waits for the copies, gathers the shards and begins to write. A collective.
  void begin_writing(Deadline copied);
  // Completes the checkpoint when the parts of this process have been written. A collective.
  void complete();
  void wait_for_copies(Deadline deadline) const;
  // Throws CheckpointError, which names the first parameter of this process that is not finite.
  void require_finite_parameters() const;
  // Fills in parts_. A collective if there are shards.
  void gather_parts();
  // Writes the parts of this process, and sets write_failure_ and is_written_.
  void write_parts();
  void join();
  // Writes the manifest. Called by the coordinator when all parts are on disk.
  void write_manifest();
  // Returns tensors of a stage, parameters or optimizer state, without sharding and under all names that the model has
  // for them. With process ranks it is a collective of the processes that have the stage.
  NamedTensors unsharded(const TrainedStage& stage, NamedTensors StageSnapshot::Tensors::* kind) const;
  // Concatenates the shards that the replicas of this process have of a tensor.
  at::Tensor local_shards(const TrainedStage& stage, const std::string& name,
                          NamedTensors StageSnapshot::Tensors::* kind) const;

  const CheckpointSource& source_;
  CheckpointWriter writer_;
  int keep_;
  CheckpointInfo info_;
  StageSnapshot::Use use_;
  StageSnapshot snapshot_;
  State state_ = State::Copying;
  // Parts by rank. Constant while the thread runs.
  std::map<int, Part> parts_;
  // Set before is_written_, and read after it.
  std::exception_ptr write_failure_;
  std::atomic<bool> is_written_ = false;
  // The last member, as the thread uses the others. Not started before training continues.
  std::thread thread_;
};

}  // namespace penstock::internal
