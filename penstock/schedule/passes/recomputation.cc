#include <numeric>
#include <unordered_set>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"

namespace penstock {
namespace {

// True if the action is, or has a part that is, the forward of the stage and microbatch.
bool runs_forward(const Action& action, int stage, int microbatch) {
  bool found = false;
  for_each_part(action, [&](const Action& part) { found |= part == forward(stage, microbatch); });
  return found;
}

}  // namespace

Schedule add_recomputation(const Schedule& schedule, const std::vector<int>& stages) {
  if (features_of(schedule).communication) {
    throw ScheduleError(
        "recomputations are added before messages, and the schedule already has messages.\n  Hint: take the schedule "
        "before it is lowered.");
  }
  require_lists(schedule);
  for (const int stage : stages) {
    if (stage >= 0 && stage < schedule.stages()) continue;
    throw ScheduleError(internal::concat("there is no stage ", stage, " to recompute; the stages are 0 to ",
                                         schedule.stages() - 1, "."));
  }
  std::vector<bool> is_selected(static_cast<std::size_t>(schedule.stages()), false);
  for (const int stage : stages) is_selected[static_cast<std::size_t>(stage)] = true;
  Schedule result = schedule.without_actions();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::unordered_set<std::size_t> recomputed;
    // The last computation of the rank so far.
    const Action* last = nullptr;
    for (const Action& action : schedule.actions(rank)) {
      for_each_part(action, [&](const Action& part) {
        if (part.computation == Computation::Recompute) recomputed.insert(schedule.cell(part.stage, part.microbatch));
        if (!makes_input_gradient(part) || !is_selected[static_cast<std::size_t>(part.stage)]) return;
        const bool follows_directly = last != nullptr && runs_forward(*last, part.stage, part.microbatch);
        if (follows_directly || runs_forward(action, part.stage, part.microbatch)) return;
        if (!recomputed.insert(schedule.cell(part.stage, part.microbatch)).second) return;
        result.add(rank, recomputation(part.stage, part.microbatch));
      });
      if (action.is_compute()) last = &action;
      result.add(rank, action);
    }
  }
  return result;
}

Schedule add_recomputation(const Schedule& schedule) {
  std::vector<int> all(static_cast<std::size_t>(schedule.stages()));
  std::iota(all.begin(), all.end(), 0);
  return add_recomputation(schedule, all);
}

}  // namespace penstock
