// The passes that add actions, for schedules that verify_each_list has accepted.
#pragma once

#include "penstock/schedule/schedule.h"

namespace penstock::internal::unchecked {

Schedule add_sharding(const Schedule& schedule, int max_active_stages);
Schedule add_reductions(Schedule schedule);
// Adds the SUM_SHARED of add_reductions alone.
Schedule add_shared_sums(Schedule schedule);
// `given` is the schedule before any pass: the error about a deadlock shows that one.
Schedule add_communication(const Schedule& schedule, const Schedule& given);

}  // namespace penstock::internal::unchecked
