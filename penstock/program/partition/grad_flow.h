// Finds the nodes that the backward passes through.
#pragma once

#include <functional>
#include <vector>

#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

// Returns for each node whether it runs with grad mode on and has an operand that requires grad. `requires_grad` tells
// which inputs do.
std::vector<bool> nodes_with_grad(const ExportedProgram& exported,
                                  const std::function<bool(const ProgramInput&)>& requires_grad);

}  // namespace penstock::internal
