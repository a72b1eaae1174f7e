// Modules of a program that are computed again in the backward.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

struct RecomputedModules {
  // For each node of the graph, the index of the part that it is in: the outermost call of a recomputed module; or -1.
  std::vector<int> part_of_node;
  // For each value that some node writes into, or into whose memory it does, one value that stands for that memory; or
  // -1.
  std::vector<int> written;

  int part_of(int node) const { return part_of_node[static_cast<std::size_t>(node)]; }
};

// Throws ProgramError for a name that is no module.
RecomputedModules recomputed_modules(const ExportedProgram& exported, std::span<const std::string> names);

// Returns the blocks that are repeated: the outermost elements of lists, such as "blocks.0" and "blocks.1", of which
// the model calls at least two of one type. A block calls more than one operator that computes a floating-point tensor;
// views do not count. A single operator mostly saves its input, which the recomputation of it alone would save too.
std::vector<std::string> repeated_modules(const ExportedProgram& exported);

}  // namespace penstock::internal
