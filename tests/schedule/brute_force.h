// A second opinion on schedules, to hold the verifier against: it follows the sentences at the top of schedule.h one by
// one, remembers all that was done as sets, and asks them about every action. It is slow and plain, and on purpose
// shares no code with verify.cc.
#pragma once

#include <cstdint>
#include <string>

#include "penstock/schedule/schedule.h"

namespace penstock::testing {

// Runs the lists action by action with blocking sends, and tells whether they finish having computed the right thing.
// Empty when so; else what went wrong, in a few words. `seed` sets the order in which ranks take their turns; the
// answer is the same for every seed.
std::string brute_force(const Schedule& schedule, const Features& expected, std::uint64_t seed = 0);

}  // namespace penstock::testing
