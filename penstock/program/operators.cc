#include "penstock/program/operators.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

using Operands = std::span<const c10::IValue>;

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

std::int64_t integer(const c10::IValue& value) {
  return value.isBool() ? static_cast<std::int64_t>(value.toBool()) : value.toInt();
}

double real(const c10::IValue& value) {
  return value.isDouble() ? value.toDouble() : static_cast<double>(integer(value));
}

bool truth(const c10::IValue& value) {
  return real(value) != 0;
}

void expect(Operands operands, std::size_t count) {
  if (operands.size() != count || !std::all_of(operands.begin(), operands.end(), is_number)) {
    throw ProgramError("arithmetic wants " + std::to_string(count) + " numbers.");
  }
}

[[noreturn]] void overflow() {
  throw ProgramError("arithmetic on sizes goes beyond 64 bits.");
}

// Two numbers, as integers when both are.
template <class OnIntegers, class OnReals>
c10::IValue binary(Operands operands, OnIntegers on_integers, OnReals on_reals) {
  expect(operands, 2);
  if (operands[0].isDouble() || operands[1].isDouble()) return on_reals(real(operands[0]), real(operands[1]));
  return on_integers(integer(operands[0]), integer(operands[1]));
}

void expect_divisor(bool nonzero) {
  if (!nonzero) throw ProgramError("arithmetic on sizes divides by zero.");
}

std::int64_t floor_divide(std::int64_t left, std::int64_t right) {
  expect_divisor(right != 0);
  if (left == std::numeric_limits<std::int64_t>::min() && right == -1) overflow();
  const std::int64_t quotient = left / right;
  return quotient - (left % right != 0 && (left < 0) != (right < 0) ? 1 : 0);
}

std::int64_t modulo(std::int64_t left, std::int64_t right) {
  expect_divisor(right != 0);
  if (right == -1) return 0;
  const std::int64_t rest = left % right;
  return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

double modulo(double left, double right) {
  expect_divisor(right != 0);
  const double rest = std::fmod(left, right);
  return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

std::int64_t to_integer(double value) {
  if (!(value >= -0x1p63 && value < 0x1p63)) overflow();
  return static_cast<std::int64_t>(value);
}

c10::IValue add(Operands operands) {
  return binary(
      operands,
      [](std::int64_t left, std::int64_t right) {
        std::int64_t result = 0;
        if (__builtin_add_overflow(left, right, &result)) overflow();
        return c10::IValue(result);
      },
      [](double left, double right) { return c10::IValue(left + right); });
}

c10::IValue subtract(Operands operands) {
  return binary(
      operands,
      [](std::int64_t left, std::int64_t right) {
        std::int64_t result = 0;
        if (__builtin_sub_overflow(left, right, &result)) overflow();
        return c10::IValue(result);
      },
      [](double left, double right) { return c10::IValue(left - right); });
}

c10::IValue multiply(Operands operands) {
  return binary(
      operands,
      [](std::int64_t left, std::int64_t right) {
        std::int64_t result = 0;
        if (__builtin_mul_overflow(left, right, &result)) overflow();
        return c10::IValue(result);
      },
      [](double left, double right) { return c10::IValue(left * right); });
}

c10::IValue power(Operands operands) {
  return binary(
      operands,
      [](std::int64_t base, std::int64_t exponent) {
        if (exponent < 0) return c10::IValue(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
        std::int64_t result = 1;
        // All but 0, 1 and -1 go beyond 64 bits before this.
        if (exponent > 64 && base >= -1 && base <= 1) exponent = 64 + exponent % 2;
        for (std::int64_t i = 0; i < exponent; ++i) {
          if (__builtin_mul_overflow(result, base, &result)) overflow();
        }
        return c10::IValue(result);
      },
      [](double base, double exponent) { return c10::IValue(std::pow(base, exponent)); });
}

c10::IValue true_divide(Operands operands) {
  expect(operands, 2);
  expect_divisor(real(operands[1]) != 0);
  return real(operands[0]) / real(operands[1]);
}

template <class Compare>
c10::IValue compare(Operands operands, Compare compare) {
  return binary(
      operands, [&](std::int64_t left, std::int64_t right) { return c10::IValue(compare(left, right)); },
      [&](double left, double right) { return c10::IValue(compare(left, right)); });
}

template <class OnBits, class OnTruth>
c10::IValue logical(Operands operands, OnBits on_bits, OnTruth on_truth) {
  expect(operands, 2);
  if (operands[0].isBool() && operands[1].isBool()) return on_truth(operands[0].toBool(), operands[1].toBool());
  if (operands[0].isDouble() || operands[1].isDouble()) throw ProgramError("bits are those of integers.");
  return on_bits(integer(operands[0]), integer(operands[1]));
}

c10::IValue least_or_most(Operands operands, bool least) {
  if (operands.empty()) throw ProgramError("the least or most of no numbers was asked for.");
  const c10::IValue* best = &operands.front();
  for (const c10::IValue& operand : operands) {
    if (!is_number(operand)) throw ProgramError("arithmetic wants numbers.");
    const bool below =
        operand.isDouble() || best->isDouble() ? real(operand) < real(*best) : integer(operand) < integer(*best);
    const bool above =
        operand.isDouble() || best->isDouble() ? real(*best) < real(operand) : integer(*best) < integer(operand);
    if (least ? below : above) best = &operand;
  }
  return *best;
}

c10::IValue rounded(Operands operands, double (*round)(double)) {
  expect(operands, 1);
  return operands[0].isDouble() ? c10::IValue(to_integer(round(operands[0].toDouble())))
                                : c10::IValue(integer(operands[0]));
}

template <double (*function)(double)>
c10::IValue of_real(Operands operands) {
  expect(operands, 1);
  return function(real(operands[0]));
}

struct NamedArithmetic {
  std::string_view name;
  Arithmetic function;
};

c10::IValue negate(Operands operands) {
  expect(operands, 1);
  if (operands[0].isDouble()) return -operands[0].toDouble();
  if (integer(operands[0]) == std::numeric_limits<std::int64_t>::min()) overflow();
  return -integer(operands[0]);
}

c10::IValue absolute(Operands operands) {
  expect(operands, 1);
  return real(operands[0]) < 0 ? negate(operands) : operands[0];
}

c10::IValue floor_division(Operands operands) {
  return binary(
      operands, [](std::int64_t left, std::int64_t right) { return c10::IValue(floor_divide(left, right)); },
      [](double left, double right) {
        expect_divisor(right != 0);
        return c10::IValue(std::floor(left / right));
      });
}

c10::IValue remainder_of(Operands operands) {
  return binary(
      operands, [](std::int64_t left, std::int64_t right) { return c10::IValue(modulo(left, right)); },
      [](double left, double right) { return c10::IValue(modulo(left, right)); });
}

c10::IValue invert(Operands operands) {
  expect(operands, 1);
  return operands[0].isBool() ? c10::IValue(!operands[0].toBool()) : c10::IValue(~integer(operands[0]));
}

// Shared by the several names that Python has for one thing.
// clang-format off
constexpr Arithmetic kAnd = [](Operands o) { return logical(o, [](std::int64_t l, std::int64_t r) { return c10::IValue(l & r); }, [](bool l, bool r) { return c10::IValue(l && r); }); };
constexpr Arithmetic kOr = [](Operands o) { return logical(o, [](std::int64_t l, std::int64_t r) { return c10::IValue(l | r); }, [](bool l, bool r) { return c10::IValue(l || r); }); };
constexpr Arithmetic kXor = [](Operands o) { return logical(o, [](std::int64_t l, std::int64_t r) { return c10::IValue(l ^ r); }, [](bool l, bool r) { return c10::IValue(l != r); }); };
constexpr Arithmetic kToInt = [](Operands o) { return rounded(o, std::trunc); };
constexpr Arithmetic kToFloat = [](Operands o) { expect(o, 1); return c10::IValue(real(o[0])); };
constexpr Arithmetic kToBool = [](Operands o) { expect(o, 1); return c10::IValue(truth(o[0])); };
constexpr Arithmetic kNot = [](Operands o) { expect(o, 1); return c10::IValue(!truth(o[0])); };
constexpr Arithmetic kMax = [](Operands o) { return least_or_most(o, /*least=*/false); };
constexpr Arithmetic kMin = [](Operands o) { return least_or_most(o, /*least=*/true); };
constexpr Arithmetic kChoose = [](Operands o) { expect(o, 3); return truth(o[0]) ? o[1] : o[2]; };
constexpr Arithmetic kSum = [](Operands o) {
  c10::IValue sum = std::int64_t{0};
  for (const c10::IValue& term : o) sum = add(std::array{sum, term});
  return sum;
};

constexpr auto kArithmetic = std::to_array<NamedArithmetic>({
    {"_operator.add", add},
    {"_operator.sub", subtract},
    {"_operator.mul", multiply},
    {"_operator.pow", power},
    {"_operator.truediv", true_divide},
    {"_operator.floordiv", floor_division},
    {"_operator.mod", remainder_of},
    {"_operator.neg", negate},
    {"_operator.pos", [](Operands o) { expect(o, 1); return o[0]; }},
    {"_operator.abs", absolute},
    {"_operator.eq", [](Operands o) { return compare(o, std::equal_to<>()); }},
    {"_operator.ne", [](Operands o) { return compare(o, std::not_equal_to<>()); }},
    {"_operator.lt", [](Operands o) { return compare(o, std::less<>()); }},
    {"_operator.le", [](Operands o) { return compare(o, std::less_equal<>()); }},
    {"_operator.gt", [](Operands o) { return compare(o, std::greater<>()); }},
    {"_operator.ge", [](Operands o) { return compare(o, std::greater_equal<>()); }},
    {"_operator.and_", kAnd},
    {"_operator.or_", kOr},
    {"_operator.xor", kXor},
    {"_operator.inv", invert},
    {"_operator.invert", invert},
    {"_operator.not_", kNot},
    {"_operator.truth", kToBool},
    {"_operator.lshift", [](Operands o) { expect(o, 2); return multiply(std::array{o[0], power(std::array{c10::IValue(std::int64_t{2}), o[1]})}); }},
    {"_operator.rshift", [](Operands o) { expect(o, 2); return floor_division(std::array{o[0], power(std::array{c10::IValue(std::int64_t{2}), o[1]})}); }},
    {"math.ceil", [](Operands o) { return rounded(o, std::ceil); }},
    {"math.floor", [](Operands o) { return rounded(o, std::floor); }},
    {"math.trunc", kToInt},
    {"builtins.round", [](Operands o) { return rounded(o, std::nearbyint); }},
    {"builtins.int", kToInt},
    {"builtins.float", kToFloat},
    {"builtins.bool", kToBool},
    {"builtins.abs", absolute},
    {"builtins.max", kMax},
    {"builtins.min", kMin},
    {"torch.sym_int", kToInt},
    {"torch.sym_float", kToFloat},
    {"torch.sym_not", kNot},
    {"torch.sym_max", kMax},
    {"torch.sym_min", kMin},
    {"torch.sym_ite", kChoose},
    {"torch.sym_sum", kSum},
    {"torch._sym_sqrt", of_real<std::sqrt>},
    {"torch._sym_cos", of_real<std::cos>},
    {"torch._sym_cosh", of_real<std::cosh>},
    {"torch._sym_sin", of_real<std::sin>},
    {"torch._sym_sinh", of_real<std::sinh>},
    {"torch._sym_tan", of_real<std::tan>},
    {"torch._sym_tanh", of_real<std::tanh>},
    {"torch._sym_acos", of_real<std::acos>},
    {"torch._sym_asin", of_real<std::asin>},
    {"torch._sym_atan", of_real<std::atan>},
    {"torch._sym_log2", of_real<std::log2>},
});
// clang-format on

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
  // torch.ops takes one number for a list of known length: each of its elements.
  list.elements.assign(static_cast<std::size_t>(std::clamp(argument.N().value_or(1), 1, 16)), std::move(operand));
  return list;
}

}  // namespace

bool may_be_called(std::string_view target) {
  constexpr auto kRefused = std::to_array<std::string_view>(
      {"torch.ops.aten.from_file.", "torch.ops.c10d.", "torch.ops._c10d_functional.", "torch.ops.c10d_functional.",
       "torch.ops._c10d_functional_autograd.", "torch.ops.symm_mem.", "torch.ops.inductor.", "torch.ops.profiler.",
       "torch.ops.aten._from_file.", "torch.ops.prim.", "torch.ops.static_runtime."});
  return std::none_of(kRefused.begin(), kRefused.end(),
                      [&](std::string_view prefix) { return target.starts_with(prefix); });
}

std::optional<std::variant<c10::OperatorHandle, Arithmetic>> find_function(std::string_view target) {
  const auto known = std::find_if(kArithmetic.begin(), kArithmetic.end(),
                                  [&](const NamedArithmetic& one) { return one.name == target; });
  if (known != kArithmetic.end()) return known->function;
  constexpr std::string_view prefix = "torch.ops.";
  if (!target.starts_with(prefix)) return std::nullopt;
  target.remove_prefix(prefix.size());
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
        operand.constant = real(operand.constant);
      } else if (operand.is_value()) {
        operand.conversion = Operand::Conversion::ToFloat;
      }
      break;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      if (operand.is_constant() && operand.constant.isBool()) operand.constant = integer(operand.constant);
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
      // An empty list, or one of integers, stands for any kind of list.
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
    // Integers become floats in a list of floats.
    return (floats && element.is_constant() && is_number(element.constant)) ||
           fits(element, *list->getElementType(), graph);
  });
}

}  // namespace penstock
