// Copies of what the stages of this process train, in host memory: from devices they run beside later computation.
//
//   StageSnapshot snapshot(stages, streams, StageSnapshot::Use::BesideTraining);
//   snapshot.block_forwards();              // before forwards, which may write to buffers
//   …
//   snapshot.block_updates();               // before optimizers, which write to parameters and their own state
//   …
//   if (!snapshot.wait(deadline)) …         // snapshot.of(stage) is readable now
#pragma once

#include <c10/core/Device.h>

#include <map>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/streams.h"
#include "penstock/device/transfer.h"
#include "penstock/tensor/named_tensors.h"
#include "penstock/train/trained_stages.h"

namespace penstock::internal {

// Used by one thread, except that any thread may read the tensors after wait().
class StageSnapshot {
 public:
  enum class Use {
    // The stages do not change before the snapshot has been used. It refers to tensors that are on the host already.
    BeforeTraining,
    // The stages train meanwhile. Tensors that are on the host are copied too.
    BesideTraining,
  };
  // Tensors of one stage: stored parameters, which may be shards, Optimizer::state() and buffers.
  struct Tensors {
    NamedTensors parameters;
    NamedTensors optimizer;
    NamedTensors buffers;
  };

  // Starts the copies to pinned memory, on all devices at the same time, after all work in the calling thread's current
  // streams. `streams` are those in which they run.
  StageSnapshot(const TrainedStages& stages, CopyStreams& streams, Use use);

  // Make later work of the calling thread's current streams wait for the copies: of the tensors that a forward may write
  // to, and of all tensors. Each device waits for its own. The host does not wait.
  void block_forwards() const;
  void block_updates() const;

  // Blocks until all copies have ended. Returns false at the deadline.
  [[nodiscard]] bool wait(Deadline deadline) const;
  // Returns the tensors of a stage, which must not be read before wait() has returned true.
  const Tensors& of(const TrainedStage& stage) const { return tensors_[stage.index]; }

 private:
  // Points in the copies from one device.
  struct Copied {
    StreamPoint of_forwards;
    StreamPoint of_updates;
  };

  void block(StreamPoint Copied::* point) const;

  // Indexed as TrainedStages.
  std::vector<Tensors> tensors_;
  std::map<c10::DeviceIndex, Copied> copied_;
  std::vector<at::Device> devices_;
};

}  // namespace penstock::internal
