#include "penstock/program/partition/effects.h"

#include <ATen/TensorUtils.h>
#include <ATen/core/enum_tag.h>
#include <ATen/core/function_schema.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

namespace penstock::internal {
namespace {

const std::optional<TensorType>& type_of(const Graph& graph, int value) {
  return graph.values[static_cast<std::size_t>(value)].type;
}

// Returns true if a tensor with these sizes and strides can be viewed in another shape without a copy.
bool can_be_viewed(const TensorType& from, const TensorType& as) {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> shape;
  for (const Dimension& size : from.sizes) sizes.push_back(size.example);
  for (const Dimension& size : as.sizes) shape.push_back(size.example);
  if (from.strides.size() != sizes.size() || from.numel() != as.numel()) return true;
  return at::detail::computeStride(sizes, from.strides, at::IntArrayRef(shape)).has_value();
}

// Returns true if an operator that returns a view or a copy, depending on its input, copies the example input.
bool copies(const Graph& graph, const Node& node, int from, int result) {
  const std::string name = node.operator_name();
  const auto& before = type_of(graph, from);
  const auto& after = type_of(graph, result);
  if (!before || !after) return false;
  if (name == "aten::to" || name == "aten::type_as")
    return before->dtype != after->dtype || before->device != after->device;
  if (name == "aten::contiguous") return before->strides != after->strides;
  if (name == "aten::reshape" || name == "aten::flatten" || name == "aten::reshape_as" || name == "aten::ravel") {
    return !can_be_viewed(*before, *after);
  }
  return false;
}

// Returns true for the detach_ that torch.tensor([…]) in a model leads to. It acts on a fresh copy of a constant, which
// has no gradient, so it has no effect.
bool detaches_constant(const Graph& graph, const Node& node) {
  if (node.operator_name() != "aten::detach_" || !node.operands.front().is_value()) return false;
  const int producer = graph.values[static_cast<std::size_t>(node.operands.front().value)].producer;
  return producer >= 0 && graph.nodes[static_cast<std::size_t>(producer)].operator_name() == "aten::lift_fresh_copy";
}

void find_annotated(const Graph& graph, std::size_t index, const c10::FunctionSchema& schema, Effects& effects) {
  const Node& node = graph.nodes[index];
  if (detaches_constant(graph, node)) return;
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* source = arguments[i].alias_info();
    if (source == nullptr) continue;
    if (source->isWrite()) {
      for_each_value(node.operands[i], [&](int value) { effects.writes[index].push_back(value); });
      continue;
    }
    if (!node.operands[i].is_value()) continue;
    const int from = node.operands[i].value;
    for (std::size_t k = 0; k < node.results.size(); ++k) {
      const c10::AliasInfo* target = schema.returns()[k].alias_info();
      if (target == nullptr) continue;
      // For "Tensor(a -> *) -> Tensor(a)[]" the alias set is that of the elements: in the list's annotation or inside
      // it.
      const bool same =
          target->beforeSets() == source->beforeSets() ||
          std::any_of(target->containedTypes().begin(), target->containedTypes().end(),
                      [&](const c10::AliasInfo& inner) { return inner.beforeSets() == source->beforeSets(); });
      if (!same) continue;
      for (const int value : node.results[k].values) {
        if (value >= 0 && !copies(graph, node, from, value)) effects.view_of[static_cast<std::size_t>(value)] = from;
      }
    }
  }
}

// Adds effects that schemas do not declare: normalisations update their running statistics in training mode, and some
// operators may return their input.
void find_unannotated(const Graph& graph, std::size_t index, const c10::OperatorHandle& handle, Effects& effects) {
  const Node& node = graph.nodes[index];
  const auto& arguments = handle.schema().arguments();
  bool is_training = false;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i].name();
    const c10::IValue& operand = node.operands[i].constant;
    if ((name == "training" || name == "use_input_stats") && operand.isBool()) is_training = operand.toBool();
  }
  // Functional variants return the new statistics.
  if (is_training && node.operator_name().find("functional") == std::string::npos) {
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const std::string& name = arguments[i].name();
      const bool statistics = name == "running_mean" || name == "running_var";
      if (statistics && arguments[i].alias_info() == nullptr && node.operands[i].is_value()) {
        effects.writes[index].push_back(node.operands[i].value);
      }
    }
  }
  if (!handle.hasTag(at::Tag::maybe_aliasing_or_mutating) || !node.operands.front().is_value()) return;
  if (node.operator_name().find("batch_norm") != std::string::npos) return;
  for_each_result(
      node, [&](int value) { effects.maybe_alias_of[static_cast<std::size_t>(value)] = node.operands.front().value; });
}

}  // namespace

int Effects::root_of(int value) const {
  while (view_of[static_cast<std::size_t>(value)] >= 0) value = view_of[static_cast<std::size_t>(value)];
  return value;
}

Effects effects_of(const Graph& graph) {
  Effects effects;
  effects.view_of.assign(graph.values.size(), -1);
  effects.maybe_alias_of.assign(graph.values.size(), -1);
  effects.writes.resize(graph.nodes.size());
  for (std::size_t index = 0; index < graph.nodes.size(); ++index) {
    const auto* handle = std::get_if<c10::OperatorHandle>(&graph.nodes[index].function);
    if (handle == nullptr) continue;
    find_annotated(graph, index, handle->schema(), effects);
    find_unannotated(graph, index, *handle, effects);
  }
  effects.users.resize(graph.values.size());
  effects.writers.resize(graph.values.size());
  for (std::size_t index = 0; index < graph.nodes.size(); ++index) {
    const auto add_to = [&](std::vector<std::vector<int>>& nodes, int value) {
      nodes[static_cast<std::size_t>(effects.root_of(value))].push_back(static_cast<int>(index));
    };
    for_each_operand_value(graph.nodes[index], [&](int operand) { add_to(effects.users, operand); });
    for (const int written : effects.writes[index]) add_to(effects.writers, written);
  }
  return effects;
}

}  // namespace penstock::internal
