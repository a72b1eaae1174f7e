// An independent verifier to test the real one against. It follows the semantics at the top of schedule.h sentence by
// sentence and records everything that happened in sets. It is slow and simple, and deliberately shares no code with
// the verifier.
#pragma once

#include <cstdint>
#include <string>

#include "penstock/schedule/schedule.h"

namespace penstock::internal::testing {

// Runs all ranks action by action with blocking sends. Returns an empty text if they complete and have computed the
// right thing, else a short description of the failure. `seed` determines the order in which ranks run; the result is
// the same for every seed.
std::string brute_force(const Schedule& schedule, const Features& expected, std::uint64_t seed = 0);

}  // namespace penstock::internal::testing
