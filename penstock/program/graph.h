// The graph of a program: nodes that call operators, in the order in which they run, and the values that go between
// them. Values and nodes are numbered; names are for people.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "penstock/program/interpreter/operator_checks.h"
#include "penstock/program/reader/size_expression.h"

namespace penstock {

// A size as it was when the program was exported, and what it is in general: without text for one that is fixed.
struct Dimension {
  std::int64_t example = 0;
  SizeExpression expression = {};

  bool is_fixed() const { return expression.text.empty(); }
};

struct TensorType {
  at::ScalarType dtype = at::ScalarType::Float;
  at::Device device = at::kCPU;
  at::Layout layout = at::kStrided;
  std::vector<Dimension> sizes = {};
  // Of the example.
  std::vector<std::int64_t> strides = {};
  bool requires_grad = false;

  // Of the example; they stay at the largest number where they would go beyond it.
  std::int64_t numel() const;
  std::int64_t bytes() const;
};

// "float32[s77, 16]".
std::string to_string(const TensorType& type);

enum class ValueKind { Tensor, Int, Float, Bool, Object };

struct Value {
  std::string name;
  ValueKind kind = ValueKind::Tensor;
  // Of a tensor, unless the export has left it out.
  std::optional<TensorType> type = std::nullopt;
  // The node that makes it; -1 for an input of the program.
  int producer = -1;
};

// What a node is given: a constant, a value, or a list with values in it.
struct Operand {
  // What a number becomes on its way.
  enum class Conversion { None, ToTensor, ToFloat };
  enum class ListKind { None, Tensors, OptionalTensors, Ints, Floats, Bools };

  // If this is no list and has no value.
  c10::IValue constant = {};
  int value = -1;
  Conversion conversion = Conversion::None;
  ListKind list = ListKind::None;
  std::vector<Operand> elements = {};

  bool is_value() const { return value >= 0; }
  bool is_constant() const { return value < 0 && list == ListKind::None; }
};

// A call of a module, inside of another; a module that is called twice has two.
struct ModuleCall {
  std::string path;
  std::string type;
  // The number of the call around it; -1 for the model itself.
  int parent = -1;
};

// What holds around a node. Left out: what holds around the program.
struct Region {
  struct Autocast {
    at::DeviceType device = at::kCPU;
    at::ScalarType dtype = at::ScalarType::BFloat16;
    bool enabled = true;
    friend bool operator==(const Autocast&, const Autocast&) = default;
  };
  std::optional<bool> grad = std::nullopt;
  std::optional<Autocast> autocast = std::nullopt;
  friend bool operator==(const Region&, const Region&) = default;
};

// Python's arithmetic on numbers.
using Arithmetic = c10::IValue (*)(std::span<const c10::IValue> operands);

struct Node {
  // A return of the operator: one value, or a list of them. -1 for what is not used.
  struct Result {
    bool is_list = false;
    std::vector<int> values = {};
  };

  std::string name = {};
  // As the export has it: "torch.ops.aten.add.Tensor".
  std::string target = {};
  std::variant<c10::OperatorHandle, Arithmetic> function;
  // Of an operator: one for each argument of its schema.
  std::vector<Operand> operands = {};
  // Called with the arguments before the operator is; may be null.
  ArgumentCheck check = nullptr;
  std::vector<Result> results = {};
  // The innermost call that it belongs to, or -1.
  int call = -1;
  int region = 0;

  bool is_operator() const { return std::holds_alternative<c10::OperatorHandle>(function); }
  // Its schema's name, such as "aten::add"; empty for arithmetic.
  std::string operator_name() const;
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;
  std::vector<ModuleCall> calls;
  // The first is that of the program.
  std::vector<Region> regions = {Region()};
  // pipe_split() in the model: each stands before the node of this number.
  std::vector<int> marks;
};

// Calls visit(value) for each value that a node, or an operand, is given: one as often as it comes.
template <class Visit>
void for_each_value(const Operand& operand, Visit&& visit) {
  if (operand.is_value()) visit(operand.value);
  for (const Operand& element : operand.elements) for_each_value(element, visit);
}
template <class Visit>
void for_each_operand_value(const Node& node, Visit&& visit) {
  for (const Operand& operand : node.operands) for_each_value(operand, visit);
}
// The same for each value that it makes.
template <class Visit>
void for_each_result(const Node& node, Visit&& visit) {
  for (const Node::Result& result : node.results) {
    for (const int value : result.values) {
      if (value >= 0) visit(value);
    }
  }
}

// A node as errors name it: "node 'linear_3' (torch.ops.aten.linear.default) of module 'blocks.0.mlp'".
std::string describe(const Graph& graph, const Node& node);

}  // namespace penstock
