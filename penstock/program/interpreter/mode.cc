#include "penstock/program/interpreter/mode.h"

#include <ATen/core/function_schema.h>

#include <string_view>
#include <utility>

namespace penstock::internal {
namespace {

// Calls visit(name, index) for each operand of an operator.
template <class Visit>
void for_each_argument(const Node& node, Visit visit) {
  const auto* handle = std::get_if<c10::OperatorHandle>(&node.function);
  if (handle == nullptr) return;
  const auto& arguments = handle->schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) visit(std::string_view(arguments[i].name()), i);
}

// Returns true for the training flag of dropout, recurrent networks and normalisations.
bool is_training_flag(std::string_view name) {
  return name == "train" || name == "training" || name == "use_input_stats";
}

// Returns true for a normalisation without running statistics, which uses those of the batch in both modes.
bool has_no_statistics(const Node& node) {
  bool none = node.operator_name().find("norm") != std::string::npos;
  for_each_argument(node, [&](std::string_view name, std::size_t) { none = none && name != "running_mean"; });
  if (none) return true;
  for_each_argument(node, [&](std::string_view name, std::size_t index) {
    const Operand& operand = node.operands[index];
    none = none || (name == "running_mean" && operand.is_constant() && operand.constant.isNone());
  });
  return none;
}

}  // namespace

bool counts_batches(const std::string& buffer) {
  constexpr std::string_view kName = "num_batches_tracked";
  return buffer == kName || buffer.ends_with(std::string(".").append(kName));
}

std::optional<bool> exported_mode(const Node& node) {
  std::optional<bool> training;
  if (has_no_statistics(node)) return training;
  for_each_argument(node, [&](std::string_view name, std::size_t index) {
    const c10::IValue& operand = node.operands[index].constant;
    if (is_training_flag(name) && operand.isBool()) training = operand.toBool();
    // A probability of 0 says nothing about the mode: the model may have no dropout.
    if (name == "dropout_p" && operand.isDouble() && operand.toDouble() > 0) training = true;
  });
  return training;
}

bool drops_in_both_modes(const Node& node) {
  return node.is_operator() && node.operator_name().starts_with("aten::bernoulli");
}

std::optional<EvaluationChange> evaluation_change(const Graph& graph, const Node& node) {
  EvaluationChange change;
  if (!has_no_statistics(node)) {
    for_each_argument(node, [&](std::string_view name, std::size_t index) {
      const c10::IValue& operand = node.operands[index].constant;
      if (is_training_flag(name) && operand.isBool() && operand.toBool()) change.operands.emplace_back(index, false);
      if (name == "dropout_p" && operand.isDouble() && operand.toDouble() > 0) change.operands.emplace_back(index, 0.0);
    });
  }
  if (node.operator_name() == "aten::add_" && node.operands.front().is_value()) {
    const Value& counter = graph.values[static_cast<std::size_t>(node.operands.front().value)];
    change.skipped =
        counter.producer < 0 && counter.name.starts_with("b_") && counter.name.ends_with("num_batches_tracked");
  }
  if (!change.skipped && change.operands.empty()) return std::nullopt;
  return change;
}

}  // namespace penstock::internal
