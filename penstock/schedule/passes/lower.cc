#include <utility>

#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/passes/unchecked.h"
#include "penstock/schedule/verify.h"

namespace penstock {

namespace unchecked = internal::unchecked;

Schedule add_sharding(const Schedule& schedule, int max_active_stages) {
  require_lists(schedule);
  return unchecked::add_sharding(schedule, max_active_stages);
}

Schedule add_reductions(Schedule schedule) {
  require_lists(schedule);
  return unchecked::add_reductions(std::move(schedule));
}

Schedule add_communication(const Schedule& schedule) {
  if (features_of(schedule).communication) throw ScheduleError("the schedule already has messages.");
  require_lists(schedule);
  return unchecked::add_communication(schedule, schedule);
}

Schedule lower(const Schedule& schedule, const LowerOptions& options) {
  const Features features = features_of(schedule);
  if (features.communication) throw ScheduleError("the schedule has already been lowered: it has messages.");
  // Deadlocks are found by add_communication, which walks all ranks.
  require_lists(schedule);
  const bool shard = options.sharding && !features.sharding;
  const bool reduce = options.reductions && !features.reduction && !features.shared_sums;
  // A list with reductions of its own may lack the sums of parameters that the model shares.
  const bool sum =
      options.reductions && features.reduction && !features.shared_sums && !schedule.graph().groups().empty();
  if (!shard && !reduce && !sum) return unchecked::add_communication(schedule, schedule);
  Schedule result = shard ? unchecked::add_sharding(schedule, options.max_active_stages) : schedule;
  if (reduce) result = unchecked::add_reductions(std::move(result));
  if (sum) result = unchecked::add_shared_sums(std::move(result));
  return unchecked::add_communication(result, schedule);
}

}  // namespace penstock
