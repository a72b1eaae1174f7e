#include <algorithm>
#include <utility>
#include <vector>

#include "penstock/schedule/passes/unchecked.h"

namespace penstock::internal::unchecked {
namespace {

// Returns the stages of a rank that have weight gradients of all microbatches, with the positions of the last ones,
// ascending.
std::vector<std::pair<std::size_t, int>> last_weight_gradients(const Schedule& schedule,
                                                               const std::vector<Action>& list) {
  std::vector<int> weight_gradients(static_cast<std::size_t>(schedule.stages()), 0);
  std::vector<std::pair<std::size_t, int>> last;
  for (std::size_t i = 0; i < list.size(); ++i) {
    for_each_part(list[i], [&](const Action& part) {
      if (!makes_weight_gradient(part)) return;
      if (++weight_gradients[static_cast<std::size_t>(part.stage)] == schedule.microbatches()) {
        last.emplace_back(i, part.stage);
      }
    });
  }
  return last;
}

}  // namespace

Schedule add_reductions(Schedule schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<Action> list = schedule.take(rank);
    auto last = last_weight_gradients(schedule, list);
    // Insert from the back, so that the remaining positions stay valid.
    std::reverse(last.begin(), last.end());
    for (const auto& [position, stage] : last) {
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(position) + 1, parameters(stage, Computation::ReduceGrad));
    }
    schedule.assign(rank, std::move(list));
  }
  return add_shared_sums(std::move(schedule));
}

Schedule add_shared_sums(Schedule schedule) {
  const StageGraph& graph = schedule.graph();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<Action> list = schedule.take(rank);
    const auto last = last_weight_gradients(schedule, list);
    const auto is_complete = [&](int stage) {
      return std::ranges::any_of(last, [stage](const auto& one) { return one.second == stage; });
    };
    for (std::size_t group = 0; group < graph.groups().size(); ++group) {
      // A rank joins once, with its first stage in the group.
      const auto local = schedule.placement().stages_of(rank);
      const auto member =
          std::ranges::find(local, static_cast<int>(group), [&](int stage) { return graph.group_of(stage); });
      if (member != local.end() && is_complete(*member)) list.push_back(parameters(*member, Computation::SumShared));
    }
    schedule.assign(rank, std::move(list));
  }
  return schedule;
}

}  // namespace penstock::internal::unchecked
