#include <utility>

#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"

namespace penstock {

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  const Features features = features_of(schedule);
  if (features.communication || features.sharding || features.reduction || features.shared_sums) {
    throw ScheduleError("the schedule has been lowered already: it contains more than computations.");
  }
  // Whether lists wait for each other for ever is found by add_communication, which walks them.
  if (const auto violation = verify_each_list(schedule, features)) throw ScheduleError(explain(schedule, *violation));
  if (!options.sharding && !options.reductions) return add_communication(schedule);
  Schedule result = options.sharding ? add_sharding(schedule, options.max_active_stages) : schedule;
  if (options.reductions) result = add_reductions(std::move(result));
  return add_communication(result);
}

}  // namespace penstock
