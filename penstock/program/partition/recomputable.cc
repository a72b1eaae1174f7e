#include "penstock/program/partition/recomputable.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>

#include "penstock/program/partition/colocation.h"
#include "penstock/program/partition/grad_flow.h"

namespace penstock::internal {
namespace {

// Operators whose computation takes no longer than sending their results.
constexpr auto kCheap = std::to_array<std::string_view>({"aten::add",
                                                         "aten::arange",
                                                         "aten::bitwise_and",
                                                         "aten::bitwise_not",
                                                         "aten::bitwise_or",
                                                         "aten::bool",
                                                         "aten::cat",
                                                         "aten::clone",
                                                         "aten::contiguous",
                                                         "aten::cos",
                                                         "aten::detach",
                                                         "aten::div",
                                                         "aten::eq",
                                                         "aten::exp",
                                                         "aten::expand",
                                                         "aten::eye",
                                                         "aten::flatten",
                                                         "aten::full",
                                                         "aten::full_like",
                                                         "aten::ge",
                                                         "aten::gt",
                                                         "aten::le",
                                                         "aten::lift_fresh_copy",
                                                         "aten::linspace",
                                                         "aten::logical_and",
                                                         "aten::logical_not",
                                                         "aten::logical_or",
                                                         "aten::lt",
                                                         "aten::masked_fill",
                                                         "aten::mul",
                                                         "aten::ne",
                                                         "aten::neg",
                                                         "aten::ones",
                                                         "aten::ones_like",
                                                         "aten::outer",
                                                         "aten::permute",
                                                         "aten::pow",
                                                         "aten::reciprocal",
                                                         "aten::repeat",
                                                         "aten::reshape",
                                                         "aten::rsub",
                                                         "aten::scalar_tensor",
                                                         "aten::select",
                                                         "aten::sin",
                                                         "aten::slice",
                                                         "aten::sparse_coo_tensor",
                                                         "aten::squeeze",
                                                         "aten::stack",
                                                         "aten::sub",
                                                         "aten::t",
                                                         "aten::to",
                                                         "aten::transpose",
                                                         "aten::tril",
                                                         "aten::triu",
                                                         "aten::unsqueeze",
                                                         "aten::view",
                                                         "aten::where",
                                                         "aten::zeros",
                                                         "aten::zeros_like"});

constexpr auto kShapeOnly = std::to_array<std::string_view>(
    {"aten::sym_is_contiguous", "aten::sym_numel", "aten::sym_size", "aten::sym_storage_offset", "aten::sym_stride"});

template <class Names>
bool contains(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

bool reads_shape_only(const Node& node) {
  return contains(kShapeOnly, node.operator_name());
}

std::vector<bool> recomputable_nodes(const StageAssignment& assignment) {
  const ExportedProgram& exported = assignment.exported();
  const Effects& effects = exported.effects;
  std::vector<bool> recomputable(exported.graph.nodes.size(), false);
  const std::set<int> mutated = mutated_values(exported);
  const std::vector<bool> has_grad =
      nodes_with_grad(exported, [](const ProgramInput& input) { return input.kind == ProgramInput::Kind::Parameter; });
  const auto is_written = [&](int value) { return !assignment.writing_stages(effects.root_of(value)).empty(); };
  for (std::size_t i = 0; i < recomputable.size(); ++i) {
    const Node& node = exported.graph.nodes[i];
    bool is_closed = true;
    for_each_operand_value(node, [&](int operand) {
      if (assignment.value(operand).kind != ValueKind::Tensor) return;
      const int producer = assignment.value(operand).producer;
      // A mutated buffer has another content for the next microbatch.
      const bool is_available = producer >= 0 ? recomputable[static_cast<std::size_t>(producer)]
                                              : assignment.is_weight(operand) && !mutated.contains(operand);
      is_closed = is_closed && is_available && !is_written(operand);
    });
    for_each_result(node, [&](int result) { is_closed = is_closed && !is_written(result); });
    const auto* handle = std::get_if<c10::OperatorHandle>(&node.function);
    recomputable[i] = is_closed && !has_grad[i] && handle != nullptr && effects.writes[i].empty() &&
                      contains(kCheap, node.operator_name()) && !handle->hasTag(at::Tag::nondeterministic_seeded);
  }
  return recomputable;
}

}  // namespace penstock::internal
