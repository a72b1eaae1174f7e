// Parameters that several stages have.
#pragma once

#include <string>
#include <vector>

namespace penstock {

// A parameter of a stage, by its name there.
struct SharedParameter {
  int stage = 0;
  std::string name;
  friend bool operator==(const SharedParameter&, const SharedParameter&) = default;
};
// For each parameter, all the stages that have it.
using SharedParameters = std::vector<std::vector<SharedParameter>>;

}  // namespace penstock
