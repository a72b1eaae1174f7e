// Candidate stage boundaries of a program, and what they cost.
#pragma once

#include <vector>

#include "penstock/program/graph.h"
#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

// Returns true if a node computes tensors, and not only sizes and checks.
bool computes(const Graph& graph, const Node& node);

// First and last node of a module call, with the calls nested in it; -1 for a call without nodes.
struct CallRange {
  int first = -1;
  int last = -1;
};
// Returns the range of nodes of each module call.
std::vector<CallRange> call_ranges(const Graph& graph);

// Cost of starting a stage with a node.
struct Boundary {
  // Number of tensors that are sent, and the seconds that it takes to send them and their gradients.
  int tensors = 0;
  double seconds = 0;
  // Number of module calls that the boundary cuts in two: 1, the model itself, between blocks; 0 only in a program
  // without modules.
  int calls = 0;
};
// Returns the boundary before each node.
std::vector<Boundary> boundaries_of(const ExportedProgram& exported);

// Returns for each node whether the colocation constraints allow that a stage starts with it.
std::vector<bool> possible_boundaries(const ExportedProgram& exported);

}  // namespace penstock::internal
