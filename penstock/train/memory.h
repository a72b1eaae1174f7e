// How much memory the tensors of each rank take, of each replica by itself. A tensor is that rank's in whose scope it was
// made, wherever it goes and whoever lets go of it, as far as that happens in a scope.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "penstock/runtime/executor.h"

namespace penstock::internal {

struct RankMemory {
  // Bytes, at most; and what was to be expected.
  std::int64_t measured = 0;
  std::int64_t predicted = 0;
};

// Memory of a stage, in bytes.
struct StageMemory {
  // Parameters and the optimizer's state, all the time.
  double held = 0;
  // Gradients of these, from the first backward on; of shards from REDUCE_GRAD on.
  double gradients = 0;
  // Parameters that are put together out of shards: twice from the first backward to REDUCE_GRAD, for their gradients.
  double unsharded = 0;
  // A microbatch from its forward to its weight gradient.
  double kept = 0;
  // Needed while a forward or a backward runs, beyond what was there before it and what it leaves.
  double working_forward = 0;
  double working_backward = 0;
  // The same for the step of the optimizer.
  double working_update = 0;
  // The message with its output, or with the gradient of that.
  double sent = 0;
};

// Returns what a rank has at most while it runs its list of a lowered schedule, or while its optimizer steps. Between processes messages are copied:
//   - A received activation counts from its RECV_F to its weight gradient, and a received gradient from its RECV_B to its
//     backward. The memory is kept for later messages, so its peak counts all the time.
//   - What was sent stays until the end of the step, up to the limits of the send queue.
double predicted_bytes(const Schedule& schedule, int rank, std::span<const StageMemory> stages, bool between_processes);

class MemoryWatch {
 public:
  // For the replicas of this process, and the ranks and stages of one.
  MemoryWatch(int ranks, int stages, int replicas);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  // While it lives, what its thread makes is a rank's; of nobody for -1. The innermost counts.
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

  // Puts each action of a pipeline's ranks into its rank's scope. Replicas are told apart by their threads.
  void watch(ActionFunctions& functions);

  // Calls `update`, the step of a stage's optimizer, and measures what it has for a while.
  void measure_update(int stage, int rank, int replica, const std::function<void()>& update);

  // Counts the memory of a tensor as the rank's, whoever has allocated it.
  void adopt(const at::Tensor& tensor, int rank, int replica);

  // At most at one time, in the replica that had the most.
  std::int64_t most(int rank) const;
  // What a forward of this stage has left behind, at most, in a step with backwards.
  std::int64_t kept(int stage) const;
  // What a forward of this stage had for a while, at most, beyond what there was before it and what it left; and a backward,
  // at least, as the first one of a step also makes the gradients.
  std::int64_t working_forward(int stage) const;
  std::int64_t working_backward(int stage) const;
  // What an update of this stage had for a while, at most, beyond what it left.
  std::int64_t working_update(int stage) const;

 private:
  struct CountsOfRank;
  struct Counts;

  // The replica that the calling thread, of this rank, works for. Which one of them it is makes no difference, as all do
  // the same; it is always the same one.
  int replica_here(int rank);
  std::int64_t now(int rank, int replica) const;
  CountsOfRank& at(int rank, int replica) const;

  std::shared_ptr<Counts> counts_;
};

}  // namespace penstock::internal
