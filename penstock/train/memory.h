// How much memory the tensors of each rank take, of each replica by itself. A tensor is that rank's in whose scope it was
// made, wherever it goes and whoever lets go of it, as far as that happens in a scope.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "penstock/runtime/executor.h"

namespace penstock {

struct RankMemory {
  // Bytes, at most; and what was to be expected.
  std::int64_t measured = 0;
  std::int64_t predicted = 0;
};

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

  // At most at one time, in the replica that had the most.
  std::int64_t most(int rank) const;
  // What a forward of this stage has left behind, at most.
  std::int64_t kept(int stage) const;

 private:
  struct Counts;

  // The replica that the calling thread, of this rank, works for. Which one of them it is makes no difference, as all do
  // the same; it is always the same one.
  int replica_here(int rank);
  std::int64_t now(int rank, int replica) const;

  std::shared_ptr<Counts> counts_;
};

}  // namespace penstock
