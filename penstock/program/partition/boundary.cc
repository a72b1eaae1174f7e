#include "penstock/program/partition/boundary.h"

#include <algorithm>

#include "penstock/base/index.h"
#include "penstock/program/partition/colocation.h"

namespace penstock::internal {

bool computes(const Graph& graph, const Node& node) {
  bool tensors = false;
  for_each_result(node, [&](int value) { tensors = tensors || graph.values[index(value)].kind == ValueKind::Tensor; });
  const auto* handle = std::get_if<c10::OperatorHandle>(&node.function);
  return handle != nullptr && (tensors || handle->schema().is_mutable());
}

std::vector<CallRange> call_ranges(const Graph& graph) {
  std::vector<CallRange> ranges(graph.calls.size());
  for (int number = 0; number < static_cast<int>(graph.nodes.size()); ++number) {
    for (int call = graph.nodes[index(number)].call; call >= 0; call = graph.calls[index(call)].parent) {
      CallRange& range = ranges[index(call)];
      if (range.first < 0) range.first = number;
      range.last = number;
    }
  }
  return ranges;
}

std::vector<Boundary> boundaries_of(const ExportedProgram& exported) {
  // Seconds for a message, for each tensor in it, and for each byte.
  constexpr double kPerMessage = 2e-5;
  constexpr double kPerTensor = 1e-5;
  constexpr double kPerByte = 4e-10;
  const Graph& graph = exported.graph;
  const std::size_t count = graph.nodes.size();
  std::vector<int> last_use(graph.values.size(), -1);
  for (int number = 0; number < static_cast<int>(count); ++number) {
    for_each_operand_value(graph.nodes[index(number)], [&](int value) { last_use[index(value)] = number; });
  }
  for (const ProgramOutput& output : exported.outputs) {
    for_each_value(output.operand, [&](int value) { last_use[index(value)] = static_cast<int>(count); });
  }
  // Differences between each boundary and the one before it.
  std::vector<Boundary> change(count + 1);
  const auto add = [&](int value, int from) {
    const auto& type = graph.values[index(value)].type;
    if (!type || last_use[index(value)] <= from) return;
    const double seconds = kPerTensor + kPerByte * static_cast<double>(type->bytes());
    change[index(from + 1)].seconds += seconds;
    ++change[index(from + 1)].tensors;
    if (last_use[index(value)] == static_cast<int>(count)) return;
    change[index(last_use[index(value)] + 1)].seconds -= seconds;
    --change[index(last_use[index(value)] + 1)].tensors;
  };
  for (int number = 0; number < static_cast<int>(count); ++number) {
    for_each_result(graph.nodes[index(number)], [&](int value) { add(value, number); });
  }
  for (const ProgramInput& input : exported.inputs) {
    if (input.kind == ProgramInput::Kind::User) add(input.value, -1);
  }
  for (const CallRange& range : call_ranges(graph)) {
    if (range.first < 0) continue;
    ++change[index(range.first + 1)].calls;
    --change[index(range.last + 1)].calls;
  }
  std::vector<Boundary> boundaries(count);
  Boundary so_far{.seconds = kPerMessage};
  for (std::size_t i = 0; i < count; ++i) {
    so_far.tensors += change[i].tensors;
    so_far.seconds += change[i].seconds;
    so_far.calls += change[i].calls;
    boundaries[i] = so_far;
  }
  return boundaries;
}

std::vector<bool> possible_boundaries(const ExportedProgram& exported) {
  const std::size_t count = exported.graph.nodes.size();
  std::vector<int> change(count + 1, 0);
  for (const ColocationConstraint& constraint : colocation_constraints(exported)) {
    // -1 stands for the first stage, which starts at node 0.
    const auto [first, last] = std::minmax({std::max(constraint.writer, 0), std::max(constraint.user, 0)});
    ++change[index(first + 1)];
    --change[index(last + 1)];
  }
  std::vector<bool> possible(count, true);
  int active = 0;
  for (std::size_t i = 0; i < count; ++i) possible[i] = (active += change[i]) == 0;
  return possible;
}

}  // namespace penstock::internal
