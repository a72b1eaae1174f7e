// Training and evaluation mode. An export has the mode baked into its nodes; this finds and switches it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/program/graph.h"

namespace penstock::internal {

// The changes to a node in evaluation mode.
struct EvaluationChange {
  // True if the node does not run, such as the one that increments num_batches_tracked.
  bool skipped = false;
  // Operands that change: their index and new value.
  std::vector<std::pair<std::size_t, c10::IValue>> operands = {};
};

// Returns the changes to a node that was exported in training mode; none if it is the same in both modes.
std::optional<EvaluationChange> evaluation_change(const Graph& graph, const Node& node);

// Returns the mode that a node was exported in, true for training; none if the node does not depend on it.
std::optional<bool> exported_mode(const Node& node);

// Returns true for a node that drops elements at random without a training flag, as in a decomposed dropout.
bool drops_in_both_modes(const Node& node);

// Returns true if a buffer is the num_batches_tracked of a batch normalisation, by its name.
bool counts_batches(const std::string& buffer);

}  // namespace penstock::internal
