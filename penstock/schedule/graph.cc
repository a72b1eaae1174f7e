#include "penstock/schedule/graph.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"

namespace penstock {

using internal::concat;

Edge edge_under(const Action& message) {
  const bool begins_here =
      message.computation == Computation::SendForward || message.computation == Computation::RecvBackward;
  return begins_here ? Edge{message.stage, message.other_stage} : Edge{message.other_stage, message.stage};
}

StageGraph::StageGraph(int stages) : stages_(stages), group_of_(static_cast<std::size_t>(std::max(stages, 0)), -1) {
  if (stages < 1) throw ScheduleError(concat("a stage graph needs at least one stage, not ", stages, "."));
  for (int stage = 1; stage < stages; ++stage) edges_.push_back({stage - 1, stage});
  index_edges();
}

void StageGraph::add_edge(int from, int to) {
  const Edge edge{from, to};
  add_edges({&edge, 1});
}

void StageGraph::add_edges(std::span<const Edge> edges) {
  for (const auto& [from, to] : edges) {
    if (from >= 0 && from < to && to < stages_) continue;
    throw ScheduleError(concat("there can be no edge from stage ", from, " to stage ", to,
                               ": an edge leads from an earlier stage to a later one of the ", stages_,
                               " stages (0 to ", stages_ - 1, ")."));
  }
  edges_.insert(edges_.end(), edges.begin(), edges.end());
  index_edges();
}

void StageGraph::share(std::vector<int> stages) {
  std::sort(stages.begin(), stages.end());
  stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  if (stages.size() < 2) throw ScheduleError("a group of stages that share parameters has at least two stages.");
  if (stages.front() < 0 || stages.back() >= stages_) {
    const int wrong = stages.front() < 0 ? stages.front() : stages.back();
    throw ScheduleError(concat("stage ", wrong, " cannot share parameters: the stages are 0 to ", stages_ - 1, "."));
  }

  // Merge groups with a stage in common.
  const auto overlaps = [&](const std::vector<int>& group) {
    return std::any_of(group.begin(), group.end(),
                       [&](int stage) { return std::binary_search(stages.begin(), stages.end(), stage); });
  };
  std::vector<std::vector<int>> groups;
  std::vector<int> merged = stages;
  for (const std::vector<int>& group : groups_) {
    if (overlaps(group)) {
      merged.insert(merged.end(), group.begin(), group.end());
    } else {
      groups.push_back(group);
    }
  }
  std::sort(merged.begin(), merged.end());
  merged.erase(std::unique(merged.begin(), merged.end()), merged.end());
  groups.push_back(std::move(merged));
  std::sort(groups.begin(), groups.end());
  groups_ = std::move(groups);

  for (std::size_t index = 0; index < groups_.size(); ++index) {
    for (const int stage : groups_[index]) group_of_[static_cast<std::size_t>(stage)] = static_cast<int>(index);
  }
}

int StageGraph::edge_index(int from, int to) const {
  if (from < 0 || to < 0 || from >= stages_ || to >= stages_) return -1;
  const auto candidates = in_edges(to);
  const auto origin = [&](int index) { return edges_[static_cast<std::size_t>(index)].from; };
  const auto found = std::ranges::lower_bound(candidates, from, {}, origin);
  return found != candidates.end() && origin(*found) == from ? *found : -1;
}

std::vector<Edge> StageGraph::skips() const {
  std::vector<Edge> result;
  std::copy_if(edges_.begin(), edges_.end(), std::back_inserter(result),
               [](const Edge& edge) { return edge.to != edge.from + 1; });
  return result;
}

void StageGraph::index_edges() {
  std::sort(edges_.begin(), edges_.end(),
            [](const Edge& a, const Edge& b) { return std::pair(a.to, a.from) < std::pair(b.to, b.from); });
  edges_.erase(std::unique(edges_.begin(), edges_.end()), edges_.end());
  in_ = incidence(&Edge::to);
  out_ = incidence(&Edge::from);
}

StageGraph::Incidence StageGraph::incidence(int Edge::* end) const {
  Incidence result;
  result.begin.assign(static_cast<std::size_t>(stages_) + 1, 0);
  for (const Edge& edge : edges_) ++result.begin[static_cast<std::size_t>(edge.*end) + 1];
  std::partial_sum(result.begin.begin(), result.begin.end(), result.begin.begin());
  std::vector<std::size_t> next = result.begin;
  result.edges.resize(edges_.size());
  for (std::size_t index = 0; index < edges_.size(); ++index) {
    result.edges[next[static_cast<std::size_t>(edges_[index].*end)]++] = static_cast<int>(index);
  }
  return result;
}

}  // namespace penstock
