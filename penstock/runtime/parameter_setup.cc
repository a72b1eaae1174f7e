#include "penstock/runtime/parameter_setup.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/stage/parameter_sync.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {
namespace {

// Tells for each parameter of a stage whether other stages have it too.
std::vector<bool> shared_flags(const SharedParameters& shared, const PipelineStage& stage) {
  std::vector<bool> flags;
  for (const auto& [name, parameter] : stage.module().parameters) {
    const SharedParameter place{stage.stage_index(), name};
    flags.push_back(std::ranges::any_of(shared, [&](const std::vector<SharedParameter>& places) {
      return std::ranges::find(places, place) != places.end();
    }));
  }
  return flags;
}

// Calls act(rank, index) on the thread of each local rank. If one throws, the waits of all end, and the first exception
// is thrown here.
void run_on_all(LocalRanks& ranks, RankThreads& threads, const std::function<void(LocalRank&, std::size_t)>& act) {
  // Protects first_error.
  Mutex mutex;
  std::exception_ptr first_error;
  const StreamPoint caller = StreamPoint::now(ranks.devices());
  threads.run([&](int index) {
    LocalRank& local = ranks.ranks()[static_cast<std::size_t>(index)];
    try {
      const RankStreams::Scope streams(local.streams);
      caller.block(local.streams.devices());
      act(local, static_cast<std::size_t>(index));
    } catch (const std::exception& error) {
      local.transport->abort(concat("rank ", local.rank, ": ", reason_of(error)));
      const MutexLock lock(mutex);
      if (!first_error) first_error = std::current_exception();
    }
  });
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace

void require_shardable(const LocalRanks& ranks) {
  std::vector<StageToShard> all;
  for (const LocalRank& local : ranks.ranks()) {
    for (const auto& [index, stage] : local.stages) {
      all.push_back({&stage->module(), shared_flags(ranks.shared_parameters(), *stage), index});
    }
  }
  require_shardable(all);
}

void synchronise_parameters(LocalRanks& ranks, RankThreads& threads, bool sharded, std::chrono::milliseconds timeout) {
  std::vector<std::map<int, std::unique_ptr<ParameterSync>>> syncs(ranks.size());
  run_on_all(ranks, threads, [&](const LocalRank& local, std::size_t index) {
    const Deadline deadline = deadline_after(timeout);
    const auto make = sharded ? shard_parameters : replicate_parameters;
    for (const auto& [stage_index, stage] : local.stages) {
      syncs[index][stage_index] = make(stage->module(), shared_flags(ranks.shared_parameters(), *stage), stage_index,
                                       local.counterparts, deadline);
    }
  });
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const RankStreams::Scope streams(ranks.ranks()[i].streams);
    for (const auto& [stage_index, stage] : ranks.ranks()[i].stages) {
      syncs[i][stage_index]->adopt();
      stage->set_sync(std::move(syncs[i][stage_index]));
    }
  }
  ranks.point_after_all().block(ranks.devices());
}

}  // namespace penstock::internal
