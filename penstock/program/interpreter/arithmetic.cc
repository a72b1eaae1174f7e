#include "penstock/program/interpreter/arithmetic.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <compare>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/error.h"

namespace penstock::internal {
namespace {

using Operands = std::span<const c10::IValue>;

bool truth(const c10::IValue& value) {
  return real_of(value) != 0;
}

void expect(Operands operands, std::size_t count) {
  if (operands.size() != count || !std::all_of(operands.begin(), operands.end(), is_number)) {
    throw ProgramError(concat("arithmetic expects ", count, " numbers."));
  }
}

[[noreturn]] void overflow() {
  throw ProgramError("arithmetic on sizes overflows 64 bits.");
}

// Calls on_integers if both operands are integers, and on_reals otherwise.
template <class OnIntegers, class OnReals>
c10::IValue binary(Operands operands, OnIntegers on_integers, OnReals on_reals) {
  expect(operands, 2);
  if (operands[0].isDouble() || operands[1].isDouble()) return on_reals(real_of(operands[0]), real_of(operands[1]));
  return on_integers(integer_of(operands[0]), integer_of(operands[1]));
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

// Like binary, for integer operations that may overflow: checked(left, right, &result) returns true if they do.
template <class Checked, class OnReals>
c10::IValue exact(Operands operands, Checked checked, OnReals on_reals) {
  return binary(
      operands,
      [&](std::int64_t left, std::int64_t right) {
        std::int64_t result = 0;
        if (checked(left, right, &result)) overflow();
        return c10::IValue(result);
      },
      [&](double left, double right) { return c10::IValue(on_reals(left, right)); });
}

c10::IValue add(Operands operands) {
  return exact(
      operands, [](auto left, auto right, auto* result) { return __builtin_add_overflow(left, right, result); },
      std::plus<>());
}

c10::IValue subtract(Operands operands) {
  return exact(
      operands, [](auto left, auto right, auto* result) { return __builtin_sub_overflow(left, right, result); },
      std::minus<>());
}

c10::IValue multiply(Operands operands) {
  return exact(
      operands, [](auto left, auto right, auto* result) { return __builtin_mul_overflow(left, right, result); },
      std::multiplies<>());
}

c10::IValue power_of_reals(double base, double exponent) {
  expect_divisor(base != 0 || !(exponent < 0));
  if (base < 0 && std::isfinite(exponent) && std::trunc(exponent) != exponent) {
    throw ProgramError("arithmetic on sizes gives a complex number.");
  }
  return std::pow(base, exponent);
}

c10::IValue power(Operands operands) {
  return binary(
      operands,
      [](std::int64_t base, std::int64_t exponent) {
        if (exponent < 0) return power_of_reals(static_cast<double>(base), static_cast<double>(exponent));
        std::int64_t result = 1;
        // With an exponent above 64, only the bases 0, 1 and -1 do not overflow.
        if (exponent > 64 && base >= -1 && base <= 1) exponent = 64 + exponent % 2;
        for (std::int64_t i = 0; i < exponent; ++i) {
          if (__builtin_mul_overflow(result, base, &result)) overflow();
        }
        return c10::IValue(result);
      },
      power_of_reals);
}

c10::IValue true_divide(Operands operands) {
  expect(operands, 2);
  expect_divisor(real_of(operands[1]) != 0);
  return real_of(operands[0]) / real_of(operands[1]);
}

// Compares by value, like Python: a large integer is not rounded for the comparison with a float.
std::partial_ordering order(const c10::IValue& left, const c10::IValue& right) {
  if (left.isDouble() == right.isDouble()) {
    return left.isDouble() ? left.toDouble() <=> right.toDouble()
                           : std::partial_ordering(integer_of(left) <=> integer_of(right));
  }
  if (left.isDouble()) return 0 <=> order(right, left);
  const double number = right.toDouble();
  if (!(number >= -0x1p63 && number < 0x1p63)) return 0.0 <=> number;
  const double whole = std::trunc(number);
  const auto by_whole = integer_of(left) <=> static_cast<std::int64_t>(whole);
  return by_whole != 0 ? std::partial_ordering(by_whole) : whole <=> number;
}

template <bool (*is)(std::partial_ordering)>
c10::IValue compare(Operands operands) {
  expect(operands, 2);
  return is(order(operands[0], operands[1]));
}

template <class OnBits, class OnTruth>
c10::IValue logical(Operands operands, OnBits on_bits, OnTruth on_truth) {
  expect(operands, 2);
  if (operands[0].isBool() && operands[1].isBool()) return on_truth(operands[0].toBool(), operands[1].toBool());
  if (operands[0].isDouble() || operands[1].isDouble()) throw ProgramError("bitwise operations expect integers.");
  return on_bits(integer_of(operands[0]), integer_of(operands[1]));
}

c10::IValue least_or_most(Operands operands, bool least) {
  if (operands.empty()) throw ProgramError("min and max expect at least one number.");
  const c10::IValue* best = &operands.front();
  for (const c10::IValue& operand : operands) {
    if (!is_number(operand)) throw ProgramError("arithmetic expects numbers.");
    const std::partial_ordering to_best = order(operand, *best);
    if (least ? to_best < 0 : to_best > 0) best = &operand;
  }
  return *best;
}

c10::IValue rounded(Operands operands, double (*round)(double)) {
  expect(operands, 1);
  return operands[0].isDouble() ? c10::IValue(to_integer(round(operands[0].toDouble())))
                                : c10::IValue(integer_of(operands[0]));
}

template <double (*function)(double)>
c10::IValue of_real(Operands operands) {
  expect(operands, 1);
  return function(real_of(operands[0]));
}

struct NamedArithmetic {
  std::string_view name;
  Arithmetic function;
};

c10::IValue negate(Operands operands) {
  expect(operands, 1);
  if (operands[0].isDouble()) return -operands[0].toDouble();
  if (integer_of(operands[0]) == std::numeric_limits<std::int64_t>::min()) overflow();
  return -integer_of(operands[0]);
}

c10::IValue absolute(Operands operands) {
  expect(operands, 1);
  return real_of(operands[0]) < 0 ? negate(operands) : operands[0];
}

c10::IValue floor_division(Operands operands) {
  return binary(
      operands, [](std::int64_t left, std::int64_t right) { return c10::IValue(floor_divide(left, right)); },
      [](double left, double right) {
        // The floor of the quotient would be wrong if the quotient was rounded up to an integer.
        const double rest = modulo(left, right);
        return c10::IValue(std::nearbyint((left - rest) / right));
      });
}

c10::IValue remainder_of(Operands operands) {
  return binary(
      operands, [](std::int64_t left, std::int64_t right) { return c10::IValue(modulo(left, right)); },
      [](double left, double right) { return c10::IValue(modulo(left, right)); });
}

std::pair<std::int64_t, std::int64_t> shifted_by(Operands operands) {
  expect(operands, 2);
  if (operands[0].isDouble() || operands[1].isDouble()) throw ProgramError("bitwise operations expect integers.");
  if (integer_of(operands[1]) < 0) throw ProgramError("the shift count is negative.");
  return {integer_of(operands[0]), integer_of(operands[1])};
}

c10::IValue shift_left(Operands operands) {
  const auto [number, by] = shifted_by(operands);
  if (number == 0) return std::int64_t{0};
  return multiply(std::array{c10::IValue(number), power(std::array{c10::IValue(std::int64_t{2}), c10::IValue(by)})});
}

c10::IValue shift_right(Operands operands) {
  const auto [number, by] = shifted_by(operands);
  return number >> std::min<std::int64_t>(by, 63);
}

c10::IValue invert(Operands operands) {
  expect(operands, 1);
  return operands[0].isBool() ? c10::IValue(!operands[0].toBool()) : c10::IValue(~integer_of(operands[0]));
}

// Functions that Python has under several names.
constexpr Arithmetic kAnd = [](Operands o) {
  return logical(
      o, [](std::int64_t l, std::int64_t r) { return c10::IValue(l & r); },
      [](bool l, bool r) { return c10::IValue(l && r); });
};
constexpr Arithmetic kOr = [](Operands o) {
  return logical(
      o, [](std::int64_t l, std::int64_t r) { return c10::IValue(l | r); },
      [](bool l, bool r) { return c10::IValue(l || r); });
};
constexpr Arithmetic kXor = [](Operands o) {
  return logical(
      o, [](std::int64_t l, std::int64_t r) { return c10::IValue(l ^ r); },
      [](bool l, bool r) { return c10::IValue(l != r); });
};
// clang-format off
constexpr Arithmetic kToInt = [](Operands o) { return rounded(o, std::trunc); };
constexpr Arithmetic kToFloat = [](Operands o) { expect(o, 1); return c10::IValue(real_of(o[0])); };
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
    {"_operator.eq", compare<std::is_eq>},
    {"_operator.ne", compare<std::is_neq>},
    {"_operator.lt", compare<std::is_lt>},
    {"_operator.le", compare<std::is_lteq>},
    {"_operator.gt", compare<std::is_gt>},
    {"_operator.ge", compare<std::is_gteq>},
    {"_operator.and_", kAnd},
    {"_operator.or_", kOr},
    {"_operator.xor", kXor},
    {"_operator.inv", invert},
    {"_operator.invert", invert},
    {"_operator.not_", kNot},
    {"_operator.truth", kToBool},
    {"_operator.lshift", shift_left},
    {"_operator.rshift", shift_right},
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

}  // namespace

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool();
}

std::int64_t integer_of(const c10::IValue& value) {
  return value.isBool() ? static_cast<std::int64_t>(value.toBool()) : value.toInt();
}

double real_of(const c10::IValue& value) {
  return value.isDouble() ? value.toDouble() : static_cast<double>(integer_of(value));
}

Arithmetic find_arithmetic(std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kArithmetic, [&](const NamedArithmetic& arithmetic) { return arithmetic.name == name; });
  return found == kArithmetic.end() ? nullptr : found->function;
}

}  // namespace penstock::internal
