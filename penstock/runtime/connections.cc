#include "penstock/runtime/connections.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/stage/parameter_sync.h"
#include "penstock/transport/threads.h"

namespace penstock::internal {
namespace {

std::vector<int> count_from(int first, int count) {
  std::vector<int> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

// Returns the devices of a rank's stages, each once.
std::vector<at::Device> devices_of(const LocalRank& local) {
  std::vector<at::Device> devices;
  for (const auto& [index, stage] : local.stages) {
    const at::Device device = with_index(stage->device());
    if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
  }
  return devices;
}

std::shared_ptr<Group> counterparts_of(const LocalRanks& ranks, const LocalRank& local) {
  std::vector<int> counterparts;
  for (int replica = 0; replica < ranks.num_replicas(); ++replica) {
    counterparts.push_back(replica * ranks.ranks_per_replica() + ranks.rank_in_replica(local));
  }
  return local.transport->group(counterparts, devices_of(local));
}

// Joins the sums of the shared parameters that a rank has. Several stages may have one tensor, in which the gradients
// of all of them accumulate. Its first rank then represents it in the sum over the copies, and all its owners meet in a
// barrier before the gradient is read.
void join_sums(const LocalRanks& ranks, LocalRank& local) {
  const int first = ranks.first_rank_of_replica(local);
  const Schedule& schedule = ranks.schedule();
  std::size_t next = 0;
  for (const std::vector<SharedParameter>& places : ranks.shared_parameters()) {
    std::set<const void*> seen;
    std::set<int> owners;
    std::set<int> representatives;
    NamedTensors represented;
    for (const SharedParameter& place : places) {
      const int rank = first + schedule.placement().rank_of(place.stage);
      const LocalRank* const owner = ranks.find(rank);
      owners.insert(rank);
      if (owner != nullptr) {
        const at::Tensor& parameter = find_parameter(*owner->stages.at(place.stage), place.name);
        if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        if (owner == &local) {
          represented.emplace_back(concat("stage ", place.stage, ", parameter '", place.name, "'"), parameter);
        }
      }
      representatives.insert(rank);
    }
    const bool is_one_tensor = representatives.size() == 1 && seen.size() <= 1 && ranks.num_replicas() == 1;
    if (!owners.contains(local.rank) || is_one_tensor) continue;
    SharedSum::Groups groups;
    if (owners != representatives)
      groups.owners = local.transport->group({owners.begin(), owners.end()}, devices_of(local));
    if (!represented.empty()) {
      std::vector<int> all;
      for (int replica = 0; replica < ranks.num_replicas(); ++replica) {
        for (const int rank : representatives) all.push_back(replica * ranks.ranks_per_replica() + rank - first);
      }
      groups.representatives = local.transport->group(all, devices_of(local));
    }
    const int group = schedule.graph().group_of(places.front().stage);
    if (next == local.sums.size()) local.sums.push_back({group, SharedSum(represented, {}, ranks.num_replicas())});
    local.sums[next++].sum.join(std::move(groups));
  }
}

}  // namespace

void connect_ranks(LocalRanks& ranks) {
  std::vector<std::unique_ptr<Transport>> transports;
  if (ranks.are_threads()) transports = thread_transports(static_cast<int>(ranks.size()));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    LocalRank& local = ranks.ranks()[i];
    local.transport = ranks.are_threads() ? std::move(transports[i]) : ranks.process_transport();
    if (ranks.num_replicas() > 1) local.counterparts = counterparts_of(ranks, local);
    for (const auto& [index, stage] : local.stages) {
      if (stage->sync() != nullptr) stage->sync()->join(local.counterparts);
    }
    if (!ranks.are_threads() && ranks.ranks_per_replica() > 1) {
      local.replica_group =
          local.transport->group(count_from(ranks.first_rank_of_replica(local), ranks.ranks_per_replica()));
    }
    join_sums(ranks, local);
  }
}

}  // namespace penstock::internal
