// Synchronises the parameters of replicas at construction: each stage gets a ParameterSync, which averages its
// gradients and, if parameters are sharded, gathers and frees them.
#pragma once

#include <chrono>

#include "penstock/runtime/local_ranks.h"
#include "penstock/runtime/rank_threads.h"

namespace penstock::internal {

// Throws StageError if a parameter of the local stages cannot be sharded.
void require_shardable(const LocalRanks& ranks);

// Copies the parameters and buffers of the first replica to the others, and shards them if `sharded`. The ranks are
// connected, and `threads` has one thread for each. If it throws, no stage has changed.
void synchronise_parameters(LocalRanks& ranks, RankThreads& threads, bool sharded, std::chrono::milliseconds timeout);

}  // namespace penstock::internal
