// Colocation constraints: nodes that have to be in one stage, because of what they mutate.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

// Requires that two nodes are in the same stage.
struct ColocationConstraint {
  enum class Kind {
    // A mutated buffer has to live in one stage, so that the next microbatch sees what was written.
    MutatedState,
    // Only the first stage has the user's inputs, and can write to them.
    MutatedInput,
    // An operator such as dropout returns its input itself in evaluation mode, and a new tensor in training mode. If
    // one of the two is mutated in a stage and the other used in a later one, the result would depend on the mode.
    AmbiguousAlias
  };

  Kind kind = Kind::MutatedState;
  // Indices of the node that writes and the node that uses what was written. -1 stands for the first stage.
  int writer = -1;
  int user = -1;
  // Name of what is mutated, for errors.
  std::string name;
};

std::vector<ColocationConstraint> colocation_constraints(const ExportedProgram& exported);

// Returns the parameters, buffers and constants that the program mutates, as values of the graph.
std::set<int> mutated_values(const ExportedProgram& exported);

}  // namespace penstock::internal
