// Names and random numbers of initial values: see penstock/program/initial_values.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace penstock::internal {

// A weight "blocks.0.linear.bias" is the member "bias" of the module "blocks.0.linear".
struct WeightName {
  // Empty for the model itself.
  std::string module;
  std::string member;

  explicit WeightName(const std::string& name);
  // Returns the name of another member of the module.
  std::string sibling(const std::string& other) const;
};

// Step of the random numbers of initial values, before any step of a training.
constexpr std::int64_t kInitialStep = -1;

// Returns the place of a weight's random numbers, a hash of its name that is the same on every machine (FNV-1a).
std::int64_t place_of(std::string_view name);

}  // namespace penstock::internal
