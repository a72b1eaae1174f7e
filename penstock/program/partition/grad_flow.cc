#include "penstock/program/partition/grad_flow.h"

namespace penstock::internal {

std::vector<bool> nodes_with_grad(const ExportedProgram& exported,
                                  const std::function<bool(const ProgramInput&)>& requires_grad) {
  const Graph& graph = exported.graph;
  std::vector<bool> values(graph.values.size(), false);
  for (const ProgramInput& input : exported.inputs) {
    if (input.value >= 0) values[static_cast<std::size_t>(input.value)] = requires_grad(input);
  }
  std::vector<bool> nodes(graph.nodes.size(), false);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (!graph.regions[static_cast<std::size_t>(node.region)].grad.value_or(true)) continue;
    for_each_operand_value(node, [&](int value) { nodes[i] = nodes[i] || values[static_cast<std::size_t>(value)]; });
    if (!nodes[i]) continue;
    for_each_result(node, [&](int value) {
      const auto& type = graph.values[static_cast<std::size_t>(value)].type;
      values[static_cast<std::size_t>(value)] =
          !type || c10::isFloatingType(type->dtype) || c10::isComplexType(type->dtype);
    });
  }
  return nodes;
}

}  // namespace penstock::internal
