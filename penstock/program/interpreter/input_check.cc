#include "penstock/program/interpreter/input_check.h"

#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

void check_fixed(const ProgramInput& input, const c10::IValue& given) {
  // An argument that was left out arrives as None.
  const c10::IValue& fixed = input.fixed;
  const bool same =
      fixed.isNone() ? given.isNone() : given.isNone() || (fixed.tagKind() == given.tagKind() && fixed == given);
  if (!same) {
    throw ProgramError(concat(input.name, ": found ", describe(given), ", expected ", describe(fixed),
                              ", the value that the program was exported with."));
  }
}

}  // namespace

void InputCheck::check(const ProgramInput& input, const c10::IValue& given) {
  if (input.kind == ProgramInput::Kind::Fixed) {
    check_fixed(input, given);
    return;
  }
  const Value& value = exported_->graph.values[static_cast<std::size_t>(input.value)];
  const auto expect = [&](bool right, const std::string& expected) {
    if (!right) throw ProgramError(concat(input.name, ": found ", describe(given), ", expected ", expected, "."));
  };
  switch (value.kind) {
    case ValueKind::Int: expect(given.isInt(), "an int"); return;
    case ValueKind::Float: expect(given.isDouble() || given.isInt(), "a float"); return;
    case ValueKind::Bool: expect(given.isBool(), "a bool"); return;
    case ValueKind::Object: return;
    case ValueKind::Tensor: break;
  }
  expect(given.isTensor() && given.toTensor().defined(), value.type ? to_string(*value.type) : "a tensor");
  if (value.type) check_tensor(input.name, *value.type, given.toTensor());
}

void InputCheck::check_tensor(const std::string& name, const TensorType& type, const at::Tensor& tensor) {
  if (tensor.scalar_type() != type.dtype) {
    throw ProgramError(
        concat(name, ": found dtype ", dtype_name(tensor.scalar_type()), ", expected ", dtype_name(type.dtype), "."));
  }
  if (static_cast<std::size_t>(tensor.dim()) != type.sizes.size()) {
    throw ProgramError(concat(name, ": found shape ", shape_text(tensor.sizes()), ", expected ", to_string(type), "."));
  }
  for (std::size_t i = 0; i < type.sizes.size(); ++i) {
    check_size(concat(name, ", dimension ", i), type.sizes[i], tensor.size(static_cast<std::int64_t>(i)));
  }
}

void InputCheck::check_size(const std::string& place, const Dimension& dimension, std::int64_t size) {
  const auto refuse = [&](const std::string& expected) {
    throw ProgramError(concat(place, ": found ", size, ", expected ", expected));
  };
  if (dimension.is_fixed()) {
    if (size == dimension.example) return;
    refuse(concat(dimension.example,
                  ", which is static.\n  Hint: torch.export.export(…, dynamic_shapes=…) makes it dynamic."));
  }
  const std::string& text = dimension.expression.text;
  // An expression that is not linear counts as a symbol of its own.
  const auto linear = dimension.expression.linear.value_or(SizeExpression::Linear{.symbol = text, .factor = 1});
  const bool is_symbol = linear.symbol == text;
  if (const auto known = seen_.find(linear.symbol); known != seen_.end()) {
    const auto& [number, where] = known->second;
    std::int64_t expected = 0;
    const bool is_too_large = __builtin_mul_overflow(linear.factor, number, &expected) ||
                              __builtin_add_overflow(expected, linear.offset, &expected);
    if (!is_too_large && size == expected) return;
    refuse((is_too_large ? "more than 64 bits can hold" : std::to_string(expected)) +
           (is_symbol ? concat(", as in ", where, " (both are ", text, ").")
                      : concat(": it is ", text, ", and ", linear.symbol, " is ", number, " by ", where, ".")));
  }
  std::int64_t multiple = 0;
  const bool is_of_form =
      !__builtin_sub_overflow(size, linear.offset, &multiple) && linear.factor > 0 && multiple % linear.factor == 0;
  if (!is_of_form) refuse(concat("a size of the form ", text, "."));
  const std::int64_t number = multiple / linear.factor;
  const auto range = exported_->ranges.find(linear.symbol);
  if (range != exported_->ranges.end() && (number < range->second.least || number > range->second.most)) {
    const std::string limits = concat(range->second.least, " to ", range->second.most);
    refuse(is_symbol ? concat(limits, " (", text, ").") : concat(text, " with ", linear.symbol, " from ", limits, "."));
  }
  seen_.emplace(linear.symbol, std::pair(number, place));
}

}  // namespace penstock::internal
