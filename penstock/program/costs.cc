#include "penstock/program/costs.h"

#include <ATen/ops/clone.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "penstock/base/deadline.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/interpreter/subgraph.h"
#include "penstock/program/partition/grad_flow.h"
#include "penstock/schedule/costs.h"
#include "penstock/tensor/random_scope.h"

namespace penstock {

using internal::state_of;

namespace {

// Throughput of one core in matrix products, its memory bandwidth, and the overhead of calling an operator.
constexpr double kFlopsPerSecond = 4e10;
constexpr double kBytesPerSecond = 1e10;
constexpr double kSecondsPerCall = 2e-6;
// The backward of a matrix product computes two products.
constexpr double kBackwardPerForward = 2;

class Estimate {
 public:
  explicit Estimate(const Graph& graph) : graph_(graph) {}

  double flops(const Node& node) const {
    const std::string name = node.operator_name();
    if (name == "aten::linear") return 2 * results(node) * size(node, 1, -1);
    if (name == "aten::mm" || name == "aten::matmul" || name == "aten::bmm" || name == "aten::mv" ||
        name == "aten::dot") {
      return 2 * results(node) * size(node, 0, -1);
    }
    if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addbmm") {
      return 2 * results(node) * size(node, 1, -1);
    }
    if (name.find("conv_transpose") != std::string::npos) {
      return 2 * elements(node, 0) * elements(node, 1) / std::max(1.0, size(node, 1, 0));
    }
    if (name.starts_with("aten::conv") || name == "aten::_convolution") {
      return 2 * results(node) * elements(node, 1) / std::max(1.0, size(node, 1, 0));
    }
    if (name.find("scaled_dot_product") != std::string::npos) {
      return 2 * (elements(node, 0) + results(node)) * size(node, 1, -2);
    }
    if (name == "aten::lstm" || name == "aten::gru" || name.starts_with("aten::rnn_")) return recurrent(node);
    if (name == "aten::einsum") return contraction(node);
    return results(node);
  }

  double bytes(const Node& node) const {
    double sum = 0;
    const auto add = [&](int value) {
      const auto& type = graph_.values[static_cast<std::size_t>(value)].type;
      if (type) sum += static_cast<double>(type->bytes());
    };
    for_each_operand_value(node, add);
    for_each_result(node, add);
    return sum;
  }

 private:
  const TensorType* type_of(const Node& node, std::size_t operand) const {
    if (operand >= node.operands.size() || !node.operands[operand].is_value()) return nullptr;
    const auto& type = graph_.values[static_cast<std::size_t>(node.operands[operand].value)].type;
    return type ? &*type : nullptr;
  }
  double elements(const Node& node, std::size_t operand) const {
    const TensorType* type = type_of(node, operand);
    return type == nullptr ? 0 : static_cast<double>(type->numel());
  }
  // Returns the size of a dimension, which counts from the end if it is negative.
  double size(const Node& node, std::size_t operand, int dimension) const {
    const TensorType* type = type_of(node, operand);
    if (type == nullptr) return 0;
    const int rank = static_cast<int>(type->sizes.size());
    const int index = dimension < 0 ? rank + dimension : dimension;
    return index < 0 || index >= rank ? 1 : static_cast<double>(type->sizes[static_cast<std::size_t>(index)].example);
  }
  double results(const Node& node) const {
    double sum = 0;
    for_each_result(node, [&](int value) {
      const auto& type = graph_.values[static_cast<std::size_t>(value)].type;
      if (type) sum += static_cast<double>(type->numel());
    });
    return sum;
  }
  // Returns the FLOPs of a recurrent network, which multiplies each element of a sequence by each weight once.
  double recurrent(const Node& node) const {
    double weights = 0;
    for (const Operand& operand : node.operands) {
      for (const Operand& element : operand.elements) {
        if (!element.is_value()) continue;
        const auto& type = graph_.values[static_cast<std::size_t>(element.value)].type;
        if (type && type->sizes.size() == 2) weights += static_cast<double>(type->numel());
      }
    }
    return 2 * weights * elements(node, 0) / std::max(1.0, size(node, 0, -1));
  }
  // Returns the FLOPs of einsum: twice the product of all sizes in its equation.
  double contraction(const Node& node) const {
    if (node.operands.size() < 2 || !node.operands[0].constant.isString()) return results(node);
    const std::string& equation = node.operands[0].constant.toStringRef();
    std::map<char, double> sizes;
    std::size_t operand = 0;
    std::size_t dimension = 0;
    for (const char letter : equation.substr(0, equation.find("->"))) {
      if (letter == ',') {
        ++operand;
        dimension = 0;
        continue;
      }
      const auto& elements = node.operands[1].elements;
      if (!std::isalpha(static_cast<unsigned char>(letter)) || operand >= elements.size()) continue;
      const auto& type = graph_.values[static_cast<std::size_t>(elements[operand].value)].type;
      if (type && dimension < type->sizes.size()) sizes[letter] = static_cast<double>(type->sizes[dimension].example);
      ++dimension;
    }
    double product = 2;
    for (const auto& [letter, size] : sizes) product *= size;
    return product;
  }

  const Graph& graph_;
};

std::vector<bool> nodes_with_grad(const Program& program) {
  return internal::nodes_with_grad(*state_of(program).exported, [&](const ProgramInput& input) {
    return input.kind == ProgramInput::Kind::Parameter && state_of(program).find_tensor(input)->requires_grad();
  });
}

}  // namespace

std::vector<NodeCost> estimated_costs(const Program& program) {
  const Graph& graph = program.graph();
  const Estimate estimate(graph);
  const internal::Effects& effects = state_of(program).exported->effects;
  const std::vector<bool> grad = nodes_with_grad(program);
  std::vector<NodeCost> costs(graph.nodes.size());
  for (std::size_t i = 0; i < costs.size(); ++i) {
    const Node& node = graph.nodes[i];
    if (!node.is_operator()) continue;
    bool is_view = !node.results.empty();
    for_each_result(node, [&](int value) {
      is_view = is_view && (effects.view_of[static_cast<std::size_t>(value)] >= 0 ||
                            graph.values[static_cast<std::size_t>(value)].kind != ValueKind::Tensor);
    });
    NodeCost& cost = costs[i];
    cost.seconds = kSecondsPerCall;
    if (!is_view) {
      cost.flops = estimate.flops(node);
      cost.bytes = estimate.bytes(node);
      cost.seconds += std::max(cost.flops / kFlopsPerSecond, cost.bytes / kBytesPerSecond);
    }
    if (grad[i]) cost.seconds *= 1 + kBackwardPerForward;
  }
  return costs;
}

std::vector<NodeCost> measured_costs(const Program& program, const Args& args, const Kwargs& kwargs) {
  constexpr int kRuns = 5;
  std::vector<NodeCost> costs = estimated_costs(program);
  const std::vector<bool> grad = nodes_with_grad(program);
  std::vector<std::vector<double>> seconds(costs.size());
  Clock::time_point last;
  auto mode = std::make_shared<internal::Interpreter::Mode>(*state_of(program).mode);
  mode->after_node = [&](int node) {
    const Clock::time_point now = Clock::now();
    seconds[static_cast<std::size_t>(node)].push_back(std::chrono::duration<double>(now - last).count());
    last = now;
  };
  const std::shared_ptr<const internal::Subgraph> subgraph = state_of(program).subgraph_on_copies(mode);
  for (int run = 0; run < kRuns; ++run) {
    const RandomScope scope(/*seed=*/0, /*step=*/run, /*microbatch=*/0, /*place=*/0);
    std::vector<c10::IValue> inputs = program.flatten_inputs(args, kwargs);
    last = Clock::now();
    subgraph->run(std::move(inputs));
  }
  for (std::size_t i = 0; i < costs.size(); ++i) {
    if (seconds[i].empty()) continue;
    costs[i].seconds = median(std::move(seconds[i])) * (grad[i] ? 1 + kBackwardPerForward : 1);
  }
  return costs;
}

}  // namespace penstock
