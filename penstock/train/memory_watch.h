// Measures how much tensor memory each rank of this process uses, per replica. Memory belongs to the rank in whose
// Scope it was allocated, until it is freed; libtorch's allocator reports both to the scope of the calling thread.
//
// The memory of a rank on a device is that of the device, as its allocator counts it: ranks that share a device have the
// same. What stages save and need temporarily is measured on the CPU only.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "penstock/runtime/actions.h"
#include "penstock/runtime/record.h"
#include "penstock/schedule/schedule.h"

namespace penstock::internal {

// All members may be called from any thread. A thread that runs under PyTorch's own memory profiler is not measured.
class MemoryWatch {
 public:
  // `schedule` is that of one replica; `replicas` is the number of replicas in this process.
  MemoryWatch(const Schedule& schedule, int replicas);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  // Sets the device of a rank, which is the CPU otherwise. Call it before the rank has run.
  void set_device(int rank, int replica, at::Device device);
  // True if a rank is on a device other than the CPU.
  bool has_devices() const;

  // Assigns the allocations of the calling thread to a rank while it lives, or to no rank for -1. Of nested scopes the
  // innermost counts.
  class Scope {
   public:
    Scope(MemoryWatch& watch, int rank, int replica = 0);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Guard;
    std::unique_ptr<Guard> guard_;
  };

  // Runs each action of a pipeline in the scope of its rank. Replicas are distinguished by their threads.
  void watch(ActionFunctions& functions);
  // Forgets the memory of single actions. Call it before each batch, between steps of the pipeline.
  void begin_batch();
  // Sets the memory of each action of the last batch in a record of one replica, for the ranks of this process.
  void add_to(Record& record) const;

  // Calls `update`, the optimizer step of a stage, and measures its temporary memory.
  void measure_update(int stage, int rank, int replica, const std::function<void()>& update);

  // Calls `loss` for the output of the last stage, on the thread of its rank, and measures what its backward keeps: the
  // tensors that it saves, and the output if it is one of them.
  at::Tensor measure_loss(const c10::IValue& output, const std::function<at::Tensor()>& loss);

  // Counts the memory of an existing tensor as the rank's.
  void adopt(const at::Tensor& tensor, int rank, int replica);

  // Returns the peak of a rank, in the replica whose peak is the highest.
  std::int64_t peak(int rank) const;
  // Return what a stage saves of one microbatch, in steps with backwards, at most: from its forward, or its
  // recomputation, to its input gradient; from there to its weight gradient, 0 if the backward is not split; and from a
  // forward that will be recomputed until then, 0 if there is none.
  std::int64_t saved_activations(int stage) const;
  std::int64_t weight_inputs(int stage) const;
  std::int64_t recomputation_inputs(int stage) const;
  // Returns what the loss of one microbatch keeps, at most.
  std::int64_t loss_bytes() const;
  // Returns the maximum temporary memory of a forward whose activations are saved, or of a recomputation, beyond what
  // was allocated before and after it; and the minimum of a backward, because the first backward of a step also
  // allocates the gradients. Of a split backward it is that of the half that needs more.
  std::int64_t forward_workspace(int stage) const;
  std::int64_t backward_workspace(int stage) const;
  // Returns the maximum temporary memory of an optimizer step.
  std::int64_t update_workspace(int stage) const;

 private:
  class DevicePeak;
  struct RankCounts;
  struct Counts;

  // Returns the replica that the calling thread of a rank is counted for. It is the same one in every call. Which one
  // does not matter, because all replicas do the same work.
  int replica_of_thread(int rank);
  std::int64_t current(int rank, int replica) const;
  RankCounts& counts_of(int rank, int replica) const;

  // Stages and microbatches with a recomputation.
  std::set<std::pair<int, int>> recomputed_;
  // Shared with the scopes of threads, which may outlive this.
  std::shared_ptr<Counts> counts_;
};

}  // namespace penstock::internal
