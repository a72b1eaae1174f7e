// The passes that add actions, for schedules whose lists have been looked at already.
#pragma once

#include "penstock/schedule/schedule.h"

namespace penstock::unchecked {

Schedule add_sharding(const Schedule& schedule, int max_active_stages);
Schedule add_reductions(Schedule schedule);
// `given` is the schedule before any pass: an error about lists that wait for each other shows that one.
Schedule add_communication(const Schedule& schedule, const Schedule& given);

}  // namespace penstock::unchecked
