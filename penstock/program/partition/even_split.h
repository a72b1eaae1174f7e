// Splits a program into stages of about equal time.
#pragma once

#include <set>
#include <span>

#include "penstock/program/costs.h"
#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

// Returns the nodes at which the stages after the first start. Minimises the time of the slowest stage, and then, among
// the splits whose slowest stage takes at most a tenth longer, the cost of the boundaries. Throws ProgramError if the
// program cannot have so many stages.
std::set<int> even_split(const ExportedProgram& exported, int stages, std::span<const NodeCost> costs);

}  // namespace penstock::internal
