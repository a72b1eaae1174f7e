// Names parameters that several stages have, such as tied embeddings.
//
//   SharedParameters shared = {{{0, "embedding.weight"}, {3, "output.weight"}}};
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
// For each shared parameter, all the stages that have it. Its gradients are summed over them.
using SharedParameters = std::vector<std::vector<SharedParameter>>;

}  // namespace penstock
