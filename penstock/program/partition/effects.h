// What the nodes of a graph do to memory: which values are views of others, and which are written to. A cut must know,
// since what is written in one stage is to be seen in the next.
#pragma once

#include <vector>

#include "penstock/program/graph.h"

namespace penstock::internal {

struct Effects {
  // For each value, the one that it is a view of, or -1.
  std::vector<int> view_of;
  // The one that it may be, or -1: dropout gives its input itself in evaluation, and something new in training.
  std::vector<int> maybe_of;
  // For each node, the values that it writes to.
  std::vector<std::vector<int>> writes;
  // For each value that is no view, the nodes that use it or a view of it, and those of them that write to it.
  std::vector<std::vector<int>> users;
  std::vector<std::vector<int>> writers;

  // The value whose memory a value lies in: itself, unless it is a view.
  int root_of(int value) const;
};

Effects effects_of(const Graph& graph);

}  // namespace penstock::internal
