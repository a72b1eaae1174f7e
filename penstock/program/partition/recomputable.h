// Nodes that each stage computes for itself, so that their results need not be sent.
#pragma once

#include <vector>

#include "penstock/program/partition/stage_assignment.h"

namespace penstock::internal {

// Returns for each node whether any stage may compute it again: it is cheap and deterministic, needs no gradient, and
// depends on constants alone, such as a causal mask.
std::vector<bool> recomputable_nodes(const StageAssignment& assignment);

// Returns true for an operator that reads the shape of a tensor, and not its elements.
bool reads_shape_only(const Node& node);

}  // namespace penstock::internal
