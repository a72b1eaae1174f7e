#include "penstock/schedule/placement.h"

#include <algorithm>
#include <string>
#include <utility>

#include "penstock/schedule/error.h"

namespace penstock {
namespace {

void require_positive(int ranks, int stages_per_rank) {
  if (ranks < 1) throw ScheduleError("a placement needs at least one rank, not " + std::to_string(ranks) + ".");
  if (stages_per_rank < 1) {
    throw ScheduleError("a placement needs at least one stage a rank, not " + std::to_string(stages_per_rank) + ".");
  }
}

}  // namespace

Placement::Placement(std::vector<int> rank_of_stage, int ranks) : rank_of_stage_(std::move(rank_of_stage)) {
  if (rank_of_stage_.empty()) throw ScheduleError("a placement needs at least one stage.");
  for (int stage = 0; stage < stages(); ++stage) {
    if (rank_of(stage) < 0) {
      throw ScheduleError("stage " + std::to_string(stage) + " is placed on rank " + std::to_string(rank_of(stage)) +
                          "; ranks are counted from 0.");
    }
  }
  const int most = *std::max_element(rank_of_stage_.begin(), rank_of_stage_.end());
  stages_of_rank_.resize(static_cast<std::size_t>(std::max(most + 1, ranks)));
  for (int stage = 0; stage < stages(); ++stage) {
    stages_of_rank_[static_cast<std::size_t>(rank_of(stage))].push_back(stage);
  }
}

Placement loop_placement(int ranks, int stages_per_rank) {
  require_positive(ranks, stages_per_rank);
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < ranks * stages_per_rank; ++stage) rank_of_stage.push_back(stage % ranks);
  return Placement(std::move(rank_of_stage));
}

Placement v_placement(int ranks, int stages_per_rank) {
  require_positive(ranks, stages_per_rank);
  std::vector<int> rank_of_stage;
  for (int stage = 0; stage < ranks * stages_per_rank; ++stage) {
    const bool upwards = stage / ranks % 2 == 0;
    rank_of_stage.push_back(upwards ? stage % ranks : ranks - 1 - stage % ranks);
  }
  return Placement(std::move(rank_of_stage));
}

}  // namespace penstock
