#include <algorithm>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"

namespace penstock {

Schedule place(const Schedule& schedule, const Placement& placement) {
  if (placement.stages() != schedule.stages()) {
    throw ScheduleError(internal::concat("a schedule of ", schedule.stages(),
                                         " stages cannot be moved to a placement of ", placement.stages(), "."));
  }
  // No computation starts before its inputs have been computed, so running in the order of the starts cannot deadlock.
  struct Started {
    double time;
    Action part;
  };
  const Costs unit;
  const Timeline timeline = simulate(schedule, unit);
  std::vector<std::vector<Started>> lists(static_cast<std::size_t>(placement.ranks()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (std::size_t i = 0; i < schedule.actions(rank).size(); ++i) {
      const Action& action = schedule.actions(rank)[i];
      const Span& span = timeline.ranks[static_cast<std::size_t>(rank)].spans[i];
      if (!action.is_compute())
        throw ScheduleError("only a schedule of computations can be moved to another placement.");
      const auto add = [&](const Action& part, double start) {
        lists[static_cast<std::size_t>(placement.rank_of(part.stage))].push_back({start, part});
      };
      if (action.is_overlap()) {
        const PairSpans spans = split_pair(action, span, unit);
        add(action.first(), spans.first.start);
        add(action.second(), spans.second.start);
      } else {
        add(action, span.start);
      }
    }
  }
  Schedule result(placement, schedule.graph(), schedule.microbatches());
  for (int rank = 0; rank < placement.ranks(); ++rank) {
    auto& list = lists[static_cast<std::size_t>(rank)];
    std::ranges::stable_sort(list, {}, &Started::time);
    for (const Started& started : list) result.add(rank, started.part);
  }
  return result;
}

}  // namespace penstock
