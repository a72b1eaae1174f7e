// The graph of an exported program: nodes that call operators, in execution order, and the values that flow between
// them. Nodes and values are identified by their index in Graph; their names serve error messages only. A Graph is
// plain data: it may be copied, and any number of threads may read it.
//
//   for (const Node& node : program.graph().nodes) std::cout << describe(program.graph(), node) << "\n";
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace penstock {

// A symbolic size, such as 2*s77 for twice the dynamic dimension s77.
struct SizeExpression {
  // factor * symbol + offset. The symbol is empty for a plain number.
  struct Linear {
    std::string symbol = {};
    std::int64_t factor = 0;
    std::int64_t offset = 0;
  };

  // The expression as people write it: "2*s77".
  std::string text;
  // None if the expression is not linear in one symbol.
  std::optional<Linear> linear;
};

// Range of sizes that a symbol may take, both ends included.
struct SymbolRange {
  std::int64_t least = 0;
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
};

// One dimension of a tensor: its size in the example inputs of the export, and its symbolic size if it is dynamic.
struct Dimension {
  std::int64_t example = 0;
  // The text is empty for a static dimension.
  SizeExpression expression = {};

  bool is_fixed() const { return expression.text.empty(); }
};

// Metadata of a tensor, as the export recorded it.
struct TensorType {
  at::ScalarType dtype = at::ScalarType::Float;
  at::Device device = at::kCPU;
  at::Layout layout = at::kStrided;
  std::vector<Dimension> sizes = {};
  // Strides of the example tensor.
  std::vector<std::int64_t> strides = {};
  bool requires_grad = false;

  // Number of elements and of bytes of the example tensor. Both saturate at the largest int64.
  std::int64_t numel() const;
  std::int64_t bytes() const;
};

// Returns "float32[s77, 16]".
std::string to_string(const TensorType& type);

enum class ValueKind { Tensor, Int, Float, Bool, Object };

struct Value {
  std::string name;
  ValueKind kind = ValueKind::Tensor;
  // Metadata of a tensor; none if the export does not have it.
  std::optional<TensorType> type = std::nullopt;
  // Index of the node that produces the value; -1 for an input of the program.
  int producer = -1;
};

// An argument of a node: a constant, a value, or a list of these.
struct Operand {
  // Implicit conversion of a number at run time, as the operator's schema demands it.
  enum class Conversion { None, ToTensor, ToFloat };
  enum class ListKind { None, Tensors, OptionalTensors, Ints, Floats, Bools };

  // Used if the operand is neither a list nor a value.
  c10::IValue constant = {};
  // Index of the value, or -1.
  int value = -1;
  Conversion conversion = Conversion::None;
  ListKind list = ListKind::None;
  std::vector<Operand> elements = {};

  bool is_value() const { return value >= 0; }
  bool is_constant() const { return value < 0 && list == ListKind::None; }
};

// A call of a module. A module that is called twice has two.
struct ModuleCall {
  // Fully qualified name of the module, such as "blocks.0.mlp"; empty for the model itself.
  std::string path;
  // Python class of the module.
  std::string type;
  // Index of the enclosing call; -1 for the model itself.
  int parent = -1;
};

// Grad mode and autocast of a group of nodes. A field without a value is inherited from the caller of the program.
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

// A function of Python's arithmetic on numbers, with which exports compute sizes.
using Arithmetic = c10::IValue (*)(std::span<const c10::IValue> operands);

// A call of an operator, or of Python's arithmetic.
struct Node {
  // One return of the operator: a value, or a list of values. -1 stands for a value that nothing uses.
  struct Result {
    bool is_list = false;
    std::vector<int> values = {};
  };

  std::string name = {};
  // Name of the callee in the export: "torch.ops.aten.add.Tensor".
  std::string target = {};
  std::variant<c10::OperatorHandle, Arithmetic> function;
  // For an operator, one operand for each argument of its schema.
  std::vector<Operand> operands = {};
  std::vector<Result> results = {};
  // Index of the innermost module call that contains the node, or -1.
  int call = -1;
  // Index of the node's region.
  int region = 0;

  bool is_operator() const { return std::holds_alternative<c10::OperatorHandle>(function); }
  // Returns the name in the operator's schema, such as "aten::add"; empty for arithmetic.
  std::string operator_name() const;
};

struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;
  std::vector<ModuleCall> calls;
  // The first region is that of the program itself.
  std::vector<Region> regions = {Region()};
  // Positions of the model's pipe_split() calls: each is the index of the node that follows the call.
  std::vector<int> marks;
  // Type of device that the nodes run on, whose autocast Program::set_autocast() selects.
  at::DeviceType device_type = at::kCPU;
};

// An input of the graph. torch.export lifts parameters, buffers and constants to inputs.
struct ProgramInput {
  // A Fixed input is a number, a string or None that the export has specialised on.
  enum class Kind { Parameter, Buffer, Constant, Object, User, Fixed };

  Kind kind = Kind::User;
  // Index of the value in the graph; -1 for a fixed input.
  int value = -1;
  // Fully qualified name in the model, such as "blocks.0.weight". For a user input its path in the arguments, such as
  // "args.0".
  std::string name;
  // True if the state_dict contains the buffer.
  bool persistent = true;
  // Value of a fixed input.
  c10::IValue fixed = {};
};

// An output of the graph: a value that is returned to the user, or the new content of a buffer, a parameter or an input
// that the model mutates.
struct ProgramOutput {
  enum class Kind { User, Buffer, Parameter, Input };

  Kind kind = Kind::User;
  Operand operand;
  // Name of the ProgramInput that is mutated; empty for a user output.
  std::string target;
};

// Calls visit(value) for each value that an operand refers to. A value that occurs twice is visited twice.
template <class Visit>
void for_each_value(const Operand& operand, Visit&& visit) {
  if (operand.is_value()) visit(operand.value);
  for (const Operand& element : operand.elements) for_each_value(element, visit);
}
// Calls visit(value) for each value that a node takes.
template <class Visit>
void for_each_operand_value(const Node& node, Visit&& visit) {
  for (const Operand& operand : node.operands) for_each_value(operand, visit);
}
// Calls visit(value) for each value that a node produces.
template <class Visit>
void for_each_result(const Node& node, Visit&& visit) {
  for (const Node::Result& result : node.results) {
    for (const int value : result.values) {
      if (value >= 0) visit(value);
    }
  }
}

// Returns the text by which errors name a node: "node 'linear_3' (torch.ops.aten.linear.default) of module
// 'blocks.0.mlp'".
std::string describe(const Graph& graph, const Node& node);

}  // namespace penstock
