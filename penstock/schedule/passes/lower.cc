#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"

namespace penstock {

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  const Features features = features_of(schedule);
  if (features.communication || features.sharding || features.reduction || features.shared_sums) {
    throw ScheduleError("the schedule has been lowered already: it contains more than computations.");
  }
  require_valid(schedule);
  Schedule result = schedule;
  if (options.sharding) result = add_sharding(result, options.max_active_stages);
  if (options.reductions) result = add_reductions(result);
  return add_communication(result);
}

}  // namespace penstock
