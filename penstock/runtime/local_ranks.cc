#include "penstock/runtime/local_ranks.h"

#include <algorithm>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/runtime/error.h"

namespace penstock::internal {

LocalRanks::LocalRanks(std::vector<StagedModel> models, const Schedule& schedule, std::shared_ptr<Transport> transport)
    : schedule_(&schedule), transport_(std::move(transport)), models_(std::move(models)) {
  place_stages();
  if (!are_threads()) require_stages_of_schedule();
  require_shared_parameters();
}

void LocalRanks::place_stages() {
  if (!are_threads() && transport_->ranks() % ranks_per_replica() != 0) {
    throw PipelineError(concat("there are ", transport_->ranks(), " processes, and the schedule is for ",
                               ranks_per_replica(), " ranks: the first number should be a multiple of the second."));
  }
  const int first = are_threads() ? 0 : transport_->rank();
  const int count = are_threads() ? ranks_per_replica() * static_cast<int>(models_.size()) : 1;
  for (int rank = first; rank < first + count; ++rank) {
    LocalRank& local = ranks_.emplace_back();
    local.rank = rank;
    for (PipelineStage& stage : models_[static_cast<std::size_t>((rank - first) / ranks_per_replica())].stages()) {
      const int placed = schedule_->placement().rank_of(stage.stage_index());
      if (placed == rank % ranks_per_replica()) local.stages[stage.stage_index()] = &stage;
    }
    std::vector<at::Device> devices;
    for (const auto& [index, stage] : local.stages) devices.push_back(stage->device());
    local.streams = RankStreams(devices);
  }
}

void LocalRanks::require_stages_of_schedule() const {
  std::vector<int> given;
  for (const PipelineStage& stage : models_.front().stages()) given.push_back(stage.stage_index());
  const auto expected = schedule_->placement().stages_of(rank_in_replica(ranks_.front()));
  if (std::ranges::equal(given, expected)) return;
  throw PipelineError(concat("this process was given stages ", join_or_none(given), ", and the schedule places stages ",
                             join_or_none(expected), " on it."));
}

void LocalRanks::require_shared_parameters() const {
  for (const std::vector<SharedParameter>& places : shared_parameters()) {
    for (const SharedParameter& place : places) {
      for (const LocalRank& local : ranks_) {
        const auto found = local.stages.find(place.stage);
        if (found != local.stages.end()) find_parameter(*found->second, place.name);
      }
    }
  }
}

int LocalRanks::num_replicas() const {
  return are_threads() ? static_cast<int>(models_.size()) : transport_->ranks() / ranks_per_replica();
}

const LocalRank* LocalRanks::find(int rank) const {
  const auto found = std::ranges::find(ranks_, rank, &LocalRank::rank);
  return found == ranks_.end() ? nullptr : &*found;
}

std::vector<at::Device> LocalRanks::devices() const {
  std::vector<at::Device> all;
  for (const LocalRank& local : ranks_) {
    for (const at::Device device : local.streams.devices()) {
      if (std::ranges::find(all, device) == all.end()) all.push_back(device);
    }
  }
  return all;
}

StreamPoint LocalRanks::point_after_all() const {
  StreamPoint point;
  for (const LocalRank& local : ranks_) point.add(local.streams.point_after());
  return point;
}

bool LocalRanks::has_stage(int stage) const {
  return std::ranges::any_of(ranks_, [stage](const LocalRank& local) { return local.stages.contains(stage); });
}

const at::Tensor& find_parameter(const PipelineStage& stage, const std::string& name) {
  for (const auto& [own, parameter] : stage.module().parameters) {
    if (own == name) return parameter;
  }
  throw PipelineError(concat("stage ", stage.stage_index(), " has no parameter '", name, "' to share."));
}

}  // namespace penstock::internal
