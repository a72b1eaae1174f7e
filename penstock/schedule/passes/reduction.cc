#include <vector>

#include "penstock/schedule/passes.h"

namespace penstock {

Schedule add_reductions(const Schedule& schedule) {
  Schedule result = schedule.without_actions();
  const StageGraph& graph = schedule.graph();
  std::vector<int> weight_gradients(static_cast<std::size_t>(schedule.stages()), 0);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    result.reserve(rank, schedule.actions(rank).size() + 2 * schedule.placement().stages_of(rank).size());
    for (const Action& action : schedule.actions(rank)) {
      result.add(rank, action);
      for_each_part(action, [&](const Action& part) {
        if (!makes_weight_gradient(part)) return;
        if (++weight_gradients[static_cast<std::size_t>(part.stage)] == schedule.microbatches()) {
          result.add(rank, parameters(part.stage, Computation::ReduceGrad));
        }
      });
    }
    for (std::size_t group = 0; group < graph.groups().size(); ++group) {
      // A rank joins once, under the name of its first stage in the group.
      for (const int stage : schedule.placement().stages_of(rank)) {
        if (graph.group_of(stage) != static_cast<int>(group)) continue;
        if (weight_gradients[static_cast<std::size_t>(stage)] == schedule.microbatches()) {
          result.add(rank, parameters(stage, Computation::SumShared));
        }
        break;
      }
    }
  }
  return result;
}

}  // namespace penstock
