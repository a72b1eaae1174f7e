#include "penstock/program/reader/operands.h"

#include <ATen/core/List.h>

#include <cstdint>
#include <utility>
#include <variant>

#include "penstock/base/text.h"
#include "penstock/program/error.h"

namespace penstock::internal {
namespace {

template <class Elements, class Make>
Operand list(Operand::ListKind kind, const Elements& elements, Make make) {
  Operand result{.list = kind};
  for (const auto& element : elements) result.elements.push_back(make(element));
  return result;
}

Operand optional_operand(const schema::OptionalTensorArgument& tensor, const Scope& scope) {
  if (tensor.tag() == schema::OptionalTensorArgument::Tag::AS_NONE) return constant({});
  return operand_of(tensor.get_as_tensor(), scope);
}

Operand int_operand(const schema::SymIntArgument& number, const Scope& scope) {
  if (number.tag() == schema::SymIntArgument::Tag::AS_INT) return constant(number.get_as_int());
  return look_up(number.get_as_name(), scope);
}

Operand float_operand(const schema::SymFloatArgument& number, const Scope& scope) {
  if (number.tag() == schema::SymFloatArgument::Tag::AS_FLOAT) return constant(number.get_as_float().get());
  return look_up(number.get_as_name(), scope);
}

Operand bool_operand(const schema::SymBoolArgument& number, const Scope& scope) {
  if (number.tag() == schema::SymBoolArgument::Tag::AS_BOOL) return constant(number.get_as_bool());
  return look_up(number.get_as_name(), scope);
}

}  // namespace

Operand constant(c10::IValue value) {
  return {.constant = std::move(value)};
}

void require_kind(const std::function<void()>& get, const std::string& message) {
  try {
    get();
  } catch (const std::bad_variant_access&) {
    throw ProgramError(message);
  }
}

void introduce(const std::string& name, Operand operand, Scope& scope) {
  if (!scope.emplace(name, std::move(operand)).second) throw ProgramError(concat("there are two values '", name, "'."));
}

const Operand& look_up(const std::string& name, const Scope& scope) {
  const auto found = scope.find(name);
  if (found == scope.end()) throw ProgramError(concat("uses '", name, "', which no node before it produces."));
  return found->second;
}

Operand operand_of(const schema::TensorArgument& tensor, const Scope& scope) {
  return look_up(tensor.get_name(), scope);
}

Operand operand_of(const schema::Argument& argument, const Scope& scope) {
  using Tag = schema::Argument::Tag;
  using List = Operand::ListKind;
  switch (argument.tag()) {
    case Tag::AS_NONE:
      // An argument of an unknown kind has this tag too.
      require_kind([&] { argument.get_as_none(); }, "has an argument of an unknown kind.");
      return constant({});
    case Tag::AS_TENSOR: return operand_of(argument.get_as_tensor(), scope);
    case Tag::AS_OPTIONAL_TENSOR: return optional_operand(argument.get_as_optional_tensor(), scope);
    case Tag::AS_TENSORS:
      return list(List::Tensors, argument.get_as_tensors(),
                  [&](const schema::TensorArgument& element) { return operand_of(element, scope); });
    case Tag::AS_OPTIONAL_TENSORS:
      return list(List::OptionalTensors, argument.get_as_optional_tensors(),
                  [&](const schema::OptionalTensorArgument& element) { return optional_operand(element, scope); });
    case Tag::AS_INT: return constant(argument.get_as_int());
    case Tag::AS_INTS:
      return list(List::Ints, argument.get_as_ints(), [](std::int64_t element) { return constant(element); });
    case Tag::AS_FLOAT: return constant(argument.get_as_float().get());
    case Tag::AS_FLOATS:
      return list(List::Floats, argument.get_as_floats(),
                  [](const schema::F64& element) { return constant(element.get()); });
    case Tag::AS_BOOL: return constant(argument.get_as_bool());
    case Tag::AS_BOOLS:
      return list(List::Bools, argument.get_as_bools(), [](bool element) { return constant(element); });
    case Tag::AS_STRING: return constant(argument.get_as_string());
    case Tag::AS_STRINGS: {
      c10::List<std::string> texts;
      for (const std::string& text : argument.get_as_strings()) texts.push_back(text);
      return constant(texts);
    }
    case Tag::AS_SYM_INT: return int_operand(argument.get_as_sym_int(), scope);
    case Tag::AS_SYM_INTS:
      return list(List::Ints, argument.get_as_sym_ints(),
                  [&](const schema::SymIntArgument& element) { return int_operand(element, scope); });
    case Tag::AS_SYM_FLOAT: return float_operand(argument.get_as_sym_float(), scope);
    case Tag::AS_SYM_FLOATS:
      return list(List::Floats, argument.get_as_sym_floats(),
                  [&](const schema::SymFloatArgument& element) { return float_operand(element, scope); });
    case Tag::AS_SYM_BOOL: return bool_operand(argument.get_as_sym_bool(), scope);
    case Tag::AS_SYM_BOOLS:
      return list(List::Bools, argument.get_as_sym_bools(),
                  [&](const schema::SymBoolArgument& element) { return bool_operand(element, scope); });
    case Tag::AS_SCALAR_TYPE: return constant(static_cast<std::int64_t>(dtype_of(argument.get_as_scalar_type())));
    case Tag::AS_MEMORY_FORMAT:
      return constant(static_cast<std::int64_t>(memory_format_of(argument.get_as_memory_format())));
    case Tag::AS_LAYOUT: return constant(static_cast<std::int64_t>(layout_of(argument.get_as_layout())));
    case Tag::AS_DEVICE: return constant(device_of(argument.get_as_device()));
    case Tag::AS_COMPLEX:
      return constant(
          c10::complex<double>(argument.get_as_complex().get_real().get(), argument.get_as_complex().get_imag().get()));
    case Tag::AS_GRAPH:
      throw ProgramError("has a graph as an argument, which is supported for regions of grad mode and autocast only.");
    case Tag::AS_CUSTOM_OBJ:
      throw ProgramError(
          concat("takes the object '", argument.get_as_custom_obj().get_name(), "', and objects are not supported."));
    case Tag::AS_OPERATOR:
      throw ProgramError(
          concat("takes the operator '", argument.get_as_operator(), "', and operators as values are not supported."));
    case Tag::AS_NESTED_TENSORS: throw ProgramError("takes lists of lists of tensors, which are not supported.");
    case Tag::AS_INT_LISTS:
    case Tag::AS_FLOAT_LISTS: throw ProgramError("takes lists of lists of numbers, which are not supported.");
    case Tag::AS_STRING_TO_ARGUMENT: throw ProgramError("takes a dict, which is not supported.");
  }
  throw ProgramError("has an argument of an unknown kind.");
}

std::string name_of(const schema::Argument& argument) {
  using Tag = schema::Argument::Tag;
  switch (argument.tag()) {
    case Tag::AS_TENSOR: return argument.get_as_tensor().get_name();
    case Tag::AS_SYM_INT:
      return argument.get_as_sym_int().tag() == schema::SymIntArgument::Tag::AS_NAME
                 ? argument.get_as_sym_int().get_as_name()
                 : "";
    case Tag::AS_SYM_FLOAT:
      return argument.get_as_sym_float().tag() == schema::SymFloatArgument::Tag::AS_NAME
                 ? argument.get_as_sym_float().get_as_name()
                 : "";
    case Tag::AS_SYM_BOOL:
      return argument.get_as_sym_bool().tag() == schema::SymBoolArgument::Tag::AS_NAME
                 ? argument.get_as_sym_bool().get_as_name()
                 : "";
    default: return "";
  }
}

}  // namespace penstock::internal
