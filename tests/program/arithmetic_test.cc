// Python's arithmetic on numbers.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "penstock/program/costs.h"
#include "penstock/program/inputs.h"
#include "penstock/program/interpreter/operators.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/tensor/random_scope.h"
#include "penstock/tensor/safetensors.h"
#include "tests/program/programs.h"
#include "tests/program/tensor_bytes.h"
#include "tests/program/zoo.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {

namespace {

TEST(Arithmetic, OfAProgramIsPythons) {
  const Program program = exported("arithmetic");
  const std::map<std::string, at::Tensor> expected = expected_of("arithmetic");
  const at::Tensor& sizes = expected.at("sizes");
  for (std::int64_t row = 0; row < sizes.numel(); ++row) {
    const auto outputs = program.run({at::ones({sizes[row].item<std::int64_t>(), 2})}).toTupleRef().elements().vec();
    ASSERT_EQ(outputs.size(), expected.size());
    for (std::size_t i = 1; i < outputs.size(); ++i) {
      const auto right = expected.at("output." + std::to_string(i))[row].item<double>();
      EXPECT_EQ(outputs[i].toScalar().toDouble(), right) << "output " << i << " of size " << sizes[row].item();
    }
  }
}

c10::IValue computed(const std::string& target, const std::vector<c10::IValue>& operands) {
  const auto function = find_function(target);
  if (!function) throw std::logic_error(target);
  return std::get<Arithmetic>(*function)(operands);
}

struct Sum {
  std::string target;
  std::vector<c10::IValue> operands;
  c10::IValue result;
};

void PrintTo(const Sum& sum, std::ostream* out) {
  *out << sum.target;
  for (const c10::IValue& operand : sum.operands) *out << " " << text(operand);
}

void expect_sum(const Sum& sum) {
  try {
    EXPECT_TRUE(same(sum.result, computed(sum.target, sum.operands))) << ::testing::PrintToString(sum);
  } catch (const ProgramError& error) {
    ADD_FAILURE() << ::testing::PrintToString(sum) << ": " << error.what();
  }
}

TEST(Arithmetic, IsPythonsOfNegativeNumbersToo) {
  // The expected values are what `python3 -c 'print(…)'` prints.
  const std::vector<Sum> sums = {
      {"_operator.floordiv", {-7, 2}, -4},
      {"_operator.floordiv", {7, -2}, -4},
      {"_operator.floordiv", {-7, -2}, 3},
      {"_operator.floordiv", {-8, 2}, -4},
      {"_operator.floordiv", {-7.5, 2}, -4.0},
      {"_operator.mod", {-7, 3}, 2},
      {"_operator.mod", {7, -3}, -2},
      {"_operator.mod", {-7, -3}, -1},
      {"_operator.mod", {INT64_MIN, -1}, 0},
      {"_operator.mod", {-7.5, 2}, 0.5},
      {"_operator.mod", {7.5, -2}, -0.5},
      {"_operator.pow", {-2, 3}, -8},
      {"_operator.pow", {-2, 2}, 4},
      {"_operator.pow", {-2, 0}, 1},
      {"_operator.pow", {-2, -1}, -0.5},
      {"_operator.pow", {-2, -2}, 0.25},
      {"_operator.pow", {-2, 63}, INT64_MIN},
      {"_operator.pow", {-1, 1'000'000'001}, -1},
      {"_operator.pow", {0, 0}, 1},
      {"_operator.pow", {2.0, -1}, 0.5},
      {"_operator.truediv", {-7, 2}, -3.5},
      {"_operator.neg", {-7}, 7},
      {"builtins.abs", {-7}, 7},
      {"builtins.abs", {-7.5}, 7.5},
      {"_operator.invert", {-7}, 6},
      {"_operator.and_", {-7, 5}, 1},
      {"_operator.or_", {-8, 5}, -3},
      {"_operator.xor", {-7, 5}, -4},
      {"_operator.lshift", {-3, 2}, -12},
      {"_operator.rshift", {-3, 1}, -2},
      {"math.ceil", {-1.5}, -1},
      {"math.floor", {-1.5}, -2},
      {"math.trunc", {-1.5}, -1},
      {"builtins.int", {-1.5}, -1},
      {"builtins.round", {-1.5}, -2},
      {"builtins.round", {-2.5}, -2},
      {"builtins.round", {0.5}, 0},
      {"builtins.max", {-1, -2}, -1},
      {"builtins.min", {-1, -2.0}, -2.0},
      {"torch.sym_max", {-1, -1.0}, -1},
      {"builtins.bool", {-1}, true},
      {"torch.sym_ite", {false, 1, -1}, -1},
      {"torch.sym_sum", {-1, -2, 4}, 1},
      {"_operator.lt", {-2, -1}, true},
      {"_operator.eq", {-1, -1.0}, true},
  };
  for (const Sum& sum : sums) expect_sum(sum);
}

TEST(Arithmetic, IsPythonsAtItsEdgesToo) {
  expect_sum({"_operator.floordiv", {1.0, 0.1}, 9.0});
  expect_sum({"_operator.rshift", {-3, 64}, -1});
  expect_sum({"_operator.floordiv", {-1.0, 0.1}, -10.0});
  expect_sum({"_operator.floordiv", {6.0, 0.5}, 12.0});
  expect_sum({"_operator.rshift", {3, 100}, 0});
  expect_sum({"_operator.lshift", {0, 100}, 0});
  expect_sum({"_operator.pow", {-8.0, 3.0}, -512.0});
  expect_sum({"_operator.lt", {(std::int64_t{1} << 53), 0x1p53 + 2}, true});
  expect_sum({"_operator.gt", {1.5, 1}, true});
  expect_sum({"_operator.lt", {INT64_MAX, 0x1p63}, true});
  expect_sum({"builtins.max", {(std::int64_t{1} << 53) + 1, 0x1p53}, (std::int64_t{1} << 53) + 1});
  expect_sum({"_operator.eq", {(std::int64_t{1} << 53) + 1, 0x1p53}, false});
  for (const Sum& refused :
       {Sum{"_operator.pow", {0, -1}, {}}, Sum{"_operator.pow", {0.0, -1.0}, {}}, Sum{"_operator.pow", {-8.0, 0.5}, {}},
        Sum{"_operator.lshift", {1, -1}, {}}, Sum{"_operator.rshift", {8, -1}, {}}}) {
    EXPECT_THROW(computed(refused.target, refused.operands), ProgramError) << ::testing::PrintToString(refused);
  }
}

TEST(Arithmetic, RefusesWhatPythonRefusesAndWhatIsTooLarge) {
  const auto refused = [](const std::string& target, const std::vector<c10::IValue>& operands,
                          const std::string& words) {
    SCOPED_TRACE(::testing::PrintToString(Sum{target, operands, {}}));
    expect_refused([&] { computed(target, operands); }, words);
  };
  const std::string zero = "arithmetic on sizes divides by zero.";
  const std::string large = "arithmetic on sizes overflows 64 bits.";
  refused("_operator.floordiv", {1, 0}, zero);
  refused("_operator.floordiv", {1.0, 0}, zero);
  refused("_operator.mod", {1, 0}, zero);
  refused("_operator.truediv", {1, 0}, zero);
  refused("_operator.add", {INT64_MAX, 1}, large);
  refused("_operator.sub", {INT64_MIN, 1}, large);
  refused("_operator.mul", {INT64_MAX, 2}, large);
  refused("_operator.neg", {INT64_MIN}, large);
  refused("_operator.pow", {2, 63}, large);
  refused("_operator.pow", {3, INT64_MAX}, large);
  refused("_operator.lshift", {1, 63}, large);
  refused("_operator.floordiv", {INT64_MIN, -1}, large);
  refused("builtins.int", {1e19}, large);
  refused("builtins.int", {std::numeric_limits<double>::quiet_NaN()}, large);
  refused("_operator.and_", {1.0, 1}, "bitwise operations expect integers.");
  refused("_operator.add", {1}, "arithmetic expects 2 numbers.");
  refused("_operator.add", {1, "2"}, "arithmetic expects 2 numbers.");
  refused("builtins.max", {}, "min and max expect at least one number.");
}

}  // namespace
}  // namespace penstock::internal::testing
