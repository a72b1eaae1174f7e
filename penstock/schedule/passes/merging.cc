#include "penstock/schedule/passes.h"

namespace penstock {

Schedule merge_backwards(const Schedule& schedule) {
  Schedule result = schedule.without_actions();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const Action& action = actions[i];
      const bool merges = action.computation == Computation::InputBackward && i + 1 < actions.size() &&
                          actions[i + 1] == weight_backward(action.stage, action.microbatch);
      if (merges) ++i;
      result.add(rank, merges ? full_backward(action.stage, action.microbatch) : action);
    }
  }
  return result;
}

}  // namespace penstock
