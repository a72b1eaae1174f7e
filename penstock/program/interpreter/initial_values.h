// Random numbers of initial values: see penstock/program/initial_values.h.
#pragma once

#include <cstdint>
#include <string_view>

namespace penstock::internal {

// Returns the place of a weight's random numbers, a hash of its name that is the same on every machine (FNV-1a).
std::int64_t place_of(std::string_view name);

}  // namespace penstock::internal
