#include <algorithm>
#include <utility>
#include <vector>

#include "penstock/schedule/passes/unchecked.h"

namespace penstock::internal::unchecked {

Schedule add_reductions(Schedule schedule) {
  const StageGraph& graph = schedule.graph();
  std::vector<int> weight_gradients(static_cast<std::size_t>(schedule.stages()), 0);
  const auto is_complete = [&](int stage) {
    return weight_gradients[static_cast<std::size_t>(stage)] == schedule.microbatches();
  };
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    // Positions of the stages' last weight gradients, ascending.
    std::vector<std::pair<std::size_t, int>> last;
    std::vector<Action> list = schedule.take(rank);
    for (std::size_t i = 0; i < list.size(); ++i) {
      for_each_part(list[i], [&](const Action& part) {
        if (!makes_weight_gradient(part)) return;
        ++weight_gradients[static_cast<std::size_t>(part.stage)];
        if (is_complete(part.stage)) last.emplace_back(i, part.stage);
      });
    }
    // Insert from the back, so that the remaining positions stay valid.
    std::reverse(last.begin(), last.end());
    for (const auto& [position, stage] : last) {
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(position) + 1, parameters(stage, Computation::ReduceGrad));
    }
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
