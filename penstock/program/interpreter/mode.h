// Training and evaluation: what an export has baked into its nodes, and how to switch it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/program/graph.h"

namespace penstock::internal {

// How a node differs in evaluation from training.
struct EvaluationChange {
  // It does nothing, such as the count of batches that a batch normalisation has seen.
  bool skipped = false;
  // Operands that are others: their numbers, and what they are.
  std::vector<std::pair<std::size_t, c10::IValue>> operands = {};
};

// Of a node that was exported in training mode; none if it is the same in both.
std::optional<EvaluationChange> evaluation_change(const Graph& graph, const Node& node);

// What a node says of the mode that it was exported in: true for training. None for most nodes.
std::optional<bool> exported_mode(const Node& node);

// Whether a node drops at random without a flag that says when: so does dropout in an export that has taken it apart.
bool drops_in_both_modes(const Node& node);

// Whether a buffer counts what a batch normalisation has seen, by its name.
bool counts_batches(const std::string& buffer);

}  // namespace penstock::internal
