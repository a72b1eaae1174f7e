#include "penstock/schedule/placement.h"

#include <algorithm>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"

namespace penstock {
namespace {

using internal::concat;

void require_positive(int ranks, int stages) {
  if (ranks < 1) throw ScheduleError(concat("a placement needs at least one rank, not ", ranks, "."));
  if (stages < 1) throw ScheduleError(concat("a placement needs at least one stage, not ", stages, "."));
}

}  // namespace

Placement::Placement(std::vector<int> rank_of_stage, int ranks) : rank_of_stage_(std::move(rank_of_stage)) {
  if (rank_of_stage_.empty()) throw ScheduleError("a placement needs at least one stage.");
  for (int stage = 0; stage < stages(); ++stage) {
    if (rank_of(stage) < 0) {
      throw ScheduleError(
          concat("stage ", stage, " is placed on rank ", rank_of(stage), "; ranks are counted from 0."));
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
  return Placement(generate_stage_to_rank_mapping(ranks, ranks * stages_per_rank, "loop"), ranks);
}

Placement v_placement(int ranks, int stages_per_rank) {
  require_positive(ranks, stages_per_rank);
  return Placement(generate_stage_to_rank_mapping(ranks, ranks * stages_per_rank, "v"), ranks);
}

std::vector<int> generate_stage_to_rank_mapping(int ranks, int stages, std::string_view style) {
  require_positive(ranks, stages);
  const bool is_v = style == "v";
  if (!is_v && style != "loop") {
    throw ScheduleError(concat("there is no placement '", style, "'.\n  Hint: the styles are loop and v."));
  }
  if (is_v && stages % ranks != 0) {
    throw ScheduleError(
        concat("a V placement needs a multiple of ", ranks, " stages on ", ranks, " ranks, not ", stages, "."));
  }
  std::vector<int> rank_of_stage;
  rank_of_stage.reserve(static_cast<std::size_t>(stages));
  for (int stage = 0; stage < stages; ++stage) {
    const bool descending = is_v && stage / ranks % 2 == 1;
    rank_of_stage.push_back(descending ? ranks - 1 - stage % ranks : stage % ranks);
  }
  return rank_of_stage;
}

std::vector<std::vector<int>> generate_rank_to_stage_mapping(int ranks, int stages, std::string_view style) {
  const Placement placement(generate_stage_to_rank_mapping(ranks, stages, style), ranks);
  std::vector<std::vector<int>> result;
  for (int rank = 0; rank < ranks; ++rank) {
    result.emplace_back(placement.stages_of(rank).begin(), placement.stages_of(rank).end());
  }
  return result;
}

}  // namespace penstock
