// Alias analysis of a graph: which values are views of others, and which are mutated. A partition needs it, because
// what one stage writes has to be visible in the next.
#pragma once

#include <vector>

#include "penstock/program/graph.h"

namespace penstock::internal {

struct Effects {
  // For each value, the value that it is a view of, or -1.
  std::vector<int> view_of;
  // For each value, the value that it may be itself, or -1. Dropout returns its input in evaluation mode, and a new
  // tensor in training mode.
  std::vector<int> maybe_alias_of;
  // For each node, the values that it writes to.
  std::vector<std::vector<int>> writes;
  // For each value that is not a view, the nodes that use it or a view of it, and the nodes among them that write to
  // it.
  std::vector<std::vector<int>> users;
  std::vector<std::vector<int>> writers;

  // Returns the value whose memory a value is in: itself, unless it is a view.
  int root_of(int value) const;
};

Effects effects_of(const Graph& graph);

}  // namespace penstock::internal
