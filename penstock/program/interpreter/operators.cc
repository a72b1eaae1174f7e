#include "penstock/program/interpreter/operators.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <array>
#include <utility>

#include "penstock/program/interpreter/arithmetic.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

at::Tensor number_tensor(const c10::IValue& number) {
  return c10::scalar_to_tensor(number.toScalar(), at::kCPU);
}

bool fits(const c10::IValue& value, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return value.isNone() || fits(value, *type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::TensorType: return value.isTensor();
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return value.isInt();
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType: return value.isDouble();
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType: return value.isBool();
    case c10::TypeKind::NumberType: return is_number(value) || value.isComplexDouble();
    case c10::TypeKind::StringType: return value.isString();
    case c10::TypeKind::DeviceObjType: return value.isDevice();
    case c10::TypeKind::ListType: {
      if (!value.isList()) return false;
      const auto list = value.toListRef();
      return std::all_of(list.begin(), list.end(), [&](const c10::IValue& element) {
        return fits(element, *type.castRaw<c10::ListType>()->getElementType());
      });
    }
    default: return true;
  }
}

bool fits(ValueKind kind, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType: return fits(kind, *type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::TensorType: return kind == ValueKind::Tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return kind == ValueKind::Int;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType: return kind == ValueKind::Float;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType: return kind == ValueKind::Bool;
    case c10::TypeKind::NumberType: return kind != ValueKind::Tensor && kind != ValueKind::Object;
    case c10::TypeKind::AnyType: return true;
    default: return false;
  }
}

Operand list_of(Operand operand, const c10::Argument& argument, Operand::ListKind kind) {
  Operand list{.list = kind};
  // For a list of known length, torch.ops takes a single number for all elements.
  list.elements.assign(static_cast<std::size_t>(std::clamp(argument.N().value_or(1), 1, 16)), std::move(operand));
  return list;
}

}  // namespace

std::optional<std::variant<c10::OperatorHandle, Arithmetic>> find_function(std::string_view target) {
  if (const Arithmetic arithmetic = find_arithmetic(target)) return arithmetic;
  constexpr std::string_view kPrefix = "torch.ops.";
  if (!target.starts_with(kPrefix)) return std::nullopt;
  target.remove_prefix(kPrefix.size());
  const std::size_t space_end = target.find('.');
  if (space_end == std::string_view::npos) return std::nullopt;
  const std::size_t name_end = target.find('.', space_end + 1);
  const std::string_view space = target.substr(0, space_end);
  const std::string_view name =
      target.substr(space_end + 1, name_end == std::string_view::npos ? name_end : name_end - space_end - 1);
  std::string_view overload = name_end == std::string_view::npos ? "" : target.substr(name_end + 1);
  if (overload == "default") overload = "";
  const auto found =
      c10::Dispatcher::singleton().findSchema({std::string(space).append("::").append(name), std::string(overload)});
  if (!found) return std::nullopt;
  return *found;
}

Operand adapted(Operand operand, const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) {
    if (operand.is_constant() && operand.constant.isNone()) return operand;
    type = optional->getElementType();
  }
  const bool is_plain = operand.list == Operand::ListKind::None;
  const bool is_known_number =
      operand.is_constant() && (is_number(operand.constant) || operand.constant.isComplexDouble());
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      if (is_known_number) {
        at::Tensor number = number_tensor(operand.constant);
        number.unsafeGetTensorImpl()->set_wrapped_number(true);
        operand.constant = std::move(number);
      } else if (operand.is_value()) {
        operand.conversion = Operand::Conversion::ToTensor;
      }
      break;
    case c10::TypeKind::FloatType:
      if (is_known_number && !operand.constant.isComplexDouble()) {
        operand.constant = real_of(operand.constant);
      } else if (operand.is_value()) {
        operand.conversion = Operand::Conversion::ToFloat;
      }
      break;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      if (operand.is_constant() && operand.constant.isBool()) operand.constant = integer_of(operand.constant);
      break;
    case c10::TypeKind::ListType: {
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      const c10::TypeKind kind = element->kind();
      const bool of_ints = kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType;
      if (is_plain && (of_ints || kind == c10::TypeKind::FloatType) && (is_known_number || operand.is_value())) {
        return list_of(std::move(operand), argument, of_ints ? Operand::ListKind::Ints : Operand::ListKind::Floats);
      }
      if (operand.list == Operand::ListKind::Tensors && kind == c10::TypeKind::OptionalType) {
        operand.list = Operand::ListKind::OptionalTensors;
      }
      // The export writes lists of integers where the schema has another kind: empty lists, and integral floats.
      if (operand.list == Operand::ListKind::Ints && kind == c10::TypeKind::FloatType) {
        operand.list = Operand::ListKind::Floats;
      }
      if (operand.list == Operand::ListKind::Ints && operand.elements.empty()) {
        if (kind == c10::TypeKind::TensorType) operand.list = Operand::ListKind::Tensors;
        if (kind == c10::TypeKind::OptionalType) operand.list = Operand::ListKind::OptionalTensors;
        if (kind == c10::TypeKind::BoolType) operand.list = Operand::ListKind::Bools;
      }
      break;
    }
    default: break;
  }
  return operand;
}

bool fits(const Operand& operand, const c10::Type& type, const Graph& graph) {
  if (operand.is_constant()) return fits(operand.constant, type);
  if (operand.is_value()) {
    const ValueKind kind = graph.values[static_cast<std::size_t>(operand.value)].kind;
    if (operand.conversion == Operand::Conversion::ToTensor) return kind != ValueKind::Object;
    if (operand.conversion == Operand::Conversion::ToFloat) return kind == ValueKind::Int || kind == ValueKind::Float;
    return fits(kind, type);
  }
  if (const auto* optional = type.castRaw<c10::OptionalType>())
    return fits(operand, *optional->getElementType(), graph);
  const auto* list = type.castRaw<c10::ListType>();
  if (list == nullptr) return type.kind() == c10::TypeKind::AnyType;
  const bool floats = list->getElementType()->kind() == c10::TypeKind::FloatType;
  return std::all_of(operand.elements.begin(), operand.elements.end(), [&](const Operand& element) {
    // A list of floats converts integers.
    return (floats && element.is_constant() && is_number(element.constant)) ||
           fits(element, *list->getElementType(), graph);
  });
}

}  // namespace penstock::internal
