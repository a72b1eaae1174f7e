#include "penstock/program/inputs.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor_split.h>

#include <algorithm>
#include <set>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/random_scope.h"

namespace penstock {

using internal::concat;
using internal::join_or_none;

namespace {

// Returns the number of rows of the smallest embedding that takes an input as its indices, if any does.
std::optional<std::int64_t> embedding_rows(const Program& program, int input) {
  const Graph& graph = program.graph();
  // The input, and the values that have the same elements.
  std::set<int> same{input};
  std::optional<std::int64_t> rows;
  for (const Node& node : graph.nodes) {
    if (!node.is_operator() || node.operands.empty()) continue;
    const std::string name = node.operator_name();
    if (name == "aten::embedding" && node.operands[1].is_value() && same.contains(node.operands[1].value)) {
      const auto& table = graph.values[static_cast<std::size_t>(node.operands[0].value)].type;
      if (table && !table->sizes.empty()) rows = std::min(rows.value_or(INT64_MAX), table->sizes.front().example);
    }
    const bool only_moves = name == "aten::view" || name == "aten::reshape" || name == "aten::to" ||
                            name == "aten::contiguous" || name == "aten::flatten" || name == "aten::clone" ||
                            name == "aten::slice" || name == "aten::unsqueeze" || name == "aten::expand";
    if (only_moves && node.operands[0].is_value() && same.contains(node.operands[0].value)) {
      for_each_result(node, [&](int value) { same.insert(value); });
    }
  }
  return rows;
}

at::Tensor example_of(const Program& program, const ProgramInput& input) {
  const auto& type = program.graph().values[static_cast<std::size_t>(input.value)].type;
  if (!type) throw ProgramError(input.name + ": the export has no shape for it.\n  Hint: give this input.");
  std::vector<std::int64_t> sizes;
  for (const Dimension& size : type->sizes) sizes.push_back(size.example);
  at::Tensor tensor = at::empty(sizes, at::TensorOptions(type->dtype));
  if (c10::isFloatingType(type->dtype) || c10::isComplexType(type->dtype)) return tensor.normal_();
  if (type->dtype == at::kBool) return tensor.bernoulli_(0.5);
  return tensor.random_(0, std::max<std::int64_t>(1, embedding_rows(program, input.value).value_or(2)));
}

// Returns true if all microbatches of an input have one number of rows.
bool has_fixed_rows(const Program& program, const ProgramInput& input) {
  const auto& type = program.graph().values[static_cast<std::size_t>(input.value)].type;
  return type && (type->sizes.empty() || type->sizes.front().is_fixed());
}

// Returns the number that a tensor contains, which may be repeated for each microbatch.
c10::IValue number_in(const std::string& name, ValueKind kind, const at::Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.eq(tensor.flatten().select(0, 0)).all().item<bool>()) {
    throw ProgramError(concat(name, ": found ", tensor.numel() == 0 ? "no number" : "several numbers",
                              ", expected one, the same for all microbatches."));
  }
  const at::Scalar number = tensor.flatten().select(0, 0).item();
  switch (kind) {
    case ValueKind::Bool: return number.toBool();
    case ValueKind::Float: return number.toDouble();
    default: break;
  }
  if (!c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    throw ProgramError(concat(name, ": found ", dtype_name(tensor.scalar_type()), ", expected an integer."));
  }
  return number.toLong();
}

}  // namespace

Arguments arguments_from(const Program& program, const TensorsByName& tensors) {
  std::vector<c10::IValue> leaves;
  std::set<std::string> known;
  for (const ProgramInput& input : program.inputs()) {
    if (input.kind == ProgramInput::Kind::Fixed) leaves.push_back(input.fixed);
    if (input.kind != ProgramInput::Kind::User) continue;
    known.insert(input.name);
    const auto found = tensors.find(input.name);
    if (found == tensors.end()) {
      std::vector<std::string> given;
      for (const auto& [name, tensor] : tensors) given.push_back(name);
      throw ProgramError(concat("the input '", input.name, "' is missing; found ", join_or_none(given), "."));
    }
    const ValueKind kind = program.graph().values[static_cast<std::size_t>(input.value)].kind;
    leaves.push_back(kind == ValueKind::Tensor ? found->second : number_in(input.name, kind, found->second));
  }
  for (const auto& [name, tensor] : tensors) {
    if (known.contains(name)) continue;
    throw ProgramError(concat("there is no input '", name, "'; the program takes ", join_or_none(known), "."));
  }
  const c10::IValue both = internal::state_of(program).exported->in_spec.unflatten(leaves);
  const auto& elements = both.toTupleRef().elements();
  Arguments arguments;
  for (const c10::IValue& arg : elements[0].toTupleRef().elements()) arguments.args.push_back(arg);
  for (const auto& entry : elements[1].toGenericDict()) {
    arguments.kwargs.emplace(entry.key().toStringRef(), entry.value());
  }
  return arguments;
}

TensorsByName example_inputs(const Program& program, int microbatches, std::uint64_t seed) {
  TensorsByName tensors;
  std::int64_t place = 0;
  for (const ProgramInput& input : program.inputs()) {
    if (input.kind != ProgramInput::Kind::User) continue;
    if (program.graph().values[static_cast<std::size_t>(input.value)].kind != ValueKind::Tensor) {
      throw ProgramError(input.name + ": is a number, and example inputs are tensors only.\n  Hint: give this input.");
    }
    std::vector<at::Tensor> parts;
    for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
      const RandomScope scope(seed, /*step=*/0, microbatch, place);
      at::Tensor part = example_of(program, input);
      parts.push_back(part.dim() == 0 ? part.unsqueeze(0) : part);
    }
    tensors.emplace(input.name, at::cat(parts));
    ++place;
  }
  return tensors;
}

int microbatches_in(const Program& program, const TensorsByName& tensors) {
  for (const ProgramInput& input : program.inputs()) {
    const auto found = tensors.find(input.name);
    if (input.kind != ProgramInput::Kind::User || found == tensors.end() || found->second.dim() == 0) continue;
    if (!has_fixed_rows(program, input)) continue;
    const auto& sizes = program.graph().values[static_cast<std::size_t>(input.value)].type->sizes;
    const std::int64_t rows = sizes.empty() ? 1 : sizes.front().example;
    if (rows > 0 && found->second.size(0) % rows == 0) return static_cast<int>(found->second.size(0) / rows);
  }
  return 0;
}

std::vector<TensorsByName> split_inputs(const Program& program, const TensorsByName& tensors, int microbatches) {
  std::vector<TensorsByName> parts(static_cast<std::size_t>(microbatches));
  for (const ProgramInput& input : program.inputs()) {
    const auto found = tensors.find(input.name);
    if (input.kind != ProgramInput::Kind::User || found == tensors.end()) continue;
    const at::Tensor& tensor = found->second;
    const auto refuse = [&](const std::string& rows, const std::string& hint) {
      throw ProgramError(concat(input.name, ": has ", rows, ", which cannot be split into ", microbatches,
                                " microbatches.\n  Hint: ", hint));
    };
    if (tensor.dim() == 0)
      refuse("no rows", "give a number, or a tensor without dimensions, as one row for each microbatch.");
    const std::string rows = concat(tensor.size(0), tensor.size(0) == 1 ? " row" : " rows");
    if (tensor.size(0) < microbatches) refuse(rows, "use fewer microbatches.");
    if (tensor.size(0) % microbatches != 0 && has_fixed_rows(program, input)) {
      refuse(rows, "use a number of microbatches that divides the rows, or export the model with dynamic_shapes.");
    }
    const std::vector<at::Tensor> chunks = tensor.tensor_split(microbatches);
    for (std::size_t i = 0; i < chunks.size(); ++i) parts[i].emplace(input.name, chunks[i]);
  }
  return parts;
}

std::vector<Arguments> split_arguments(const Program& program, const TensorsByName& tensors, int microbatches) {
  std::vector<Arguments> arguments;
  for (const TensorsByName& part : split_inputs(program, tensors, microbatches)) {
    arguments.push_back(arguments_from(program, part));
  }
  return arguments;
}

TensorsByName outputs_by_name(const std::vector<c10::IValue>& outputs) {
  std::map<std::string, std::vector<at::Tensor>> rows;
  for (const c10::IValue& output : outputs) {
    const std::vector<c10::IValue> leaves = flatten_args(output);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      std::vector<at::Tensor>& row = rows[concat("output.", i)];
      const c10::IValue& leaf = leaves[i];
      if (leaf.isTensor() && leaf.toTensor().defined()) row.push_back(leaf.toTensor().detach());
      if (leaf.isInt()) row.push_back(at::scalar_tensor(leaf.toInt(), at::TensorOptions(at::kLong)));
      if (leaf.isDouble()) row.push_back(at::scalar_tensor(leaf.toDouble(), at::TensorOptions(at::kDouble)));
      if (leaf.isBool()) row.push_back(at::scalar_tensor(leaf.toBool(), at::TensorOptions(at::kBool)));
    }
  }
  TensorsByName merged;
  for (const auto& [name, row] : rows) {
    if (!row.empty()) merged.emplace(name, row.front().dim() == 0 ? at::stack(row) : at::cat(row));
  }
  return merged;
}

}  // namespace penstock
