// Through which nodes of a graph a backward comes.
#pragma once

#include <functional>
#include <vector>

#include "penstock/program/reader/exported.h"

namespace penstock::internal {

// For each node, whether it has an operand with a gradient, in a region that has gradients. `learns` says which inputs
// need one.
std::vector<bool> nodes_with_grad(const Exported& exported, const std::function<bool(const ProgramInput&)>& learns);

}  // namespace penstock::internal
