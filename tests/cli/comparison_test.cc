#include "penstock/cli/program/comparison.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <string>

#include "penstock/program/error.h"
#include "tests/thrown.h"

namespace penstock::internal::cli {
namespace {

constexpr double kSpacing = 1.1920929e-07;

Comparison gradients(const TensorsByName& expected, const TensorsByName& found, ComparisonOptions options = {}) {
  options.prefix = "grad.";
  return compare(expected, found, options);
}

std::string line(const Comparison& comparison) {
  std::ostringstream text;
  comparison.write(text, "gradients");
  return std::move(text).str();
}

TEST(Comparison, ToleratesOtherNoiseInAGradientThatIsRoundingOfTheModels) {
  const at::Tensor weight = at::full({3}, 2.0);
  const Comparison comparison = gradients({{"grad.bias", at::full({3}, 1e-15)}, {"grad.weight", weight}},
                                          {{"grad.bias", at::full({3}, -4e-15)}, {"grad.weight", weight}});
  EXPECT_TRUE(comparison.is_tolerable());
  EXPECT_FALSE(comparison.is_identical());
  EXPECT_EQ(line(comparison),
            "  gradients: 2, of which 1 are bitwise identical; the largest difference is 5e-15 in grad.bias (1.25 "
            "relative to its "
            "own scale, 2.5e-15 relative to the largest of all gradients)\n");
}

TEST(Comparison, RefusesAWrongGradientThatIsSmallAndNotNoise) {
  const at::Tensor weight = at::full({3}, 2.0);
  const Comparison comparison = gradients({{"grad.bias", at::full({3}, 1e-5)}, {"grad.weight", weight}},
                                          {{"grad.bias", at::full({3}, 1.1e-5)}, {"grad.weight", weight}});
  EXPECT_FALSE(comparison.is_tolerable());
}

TEST(Comparison, RefusesNoiseWhereAGradientIsExpectedAndTheReverse) {
  const at::Tensor weight = at::full({3}, 2.0);
  for (const auto& [one, other] : {std::pair(1e-15, 1.0), std::pair(1.0, 1e-15)}) {
    EXPECT_FALSE(gradients({{"grad.bias", at::full({3}, one)}, {"grad.weight", weight}},
                           {{"grad.bias", at::full({3}, other)}, {"grad.weight", weight}})
                     .is_tolerable());
  }
}

TEST(Comparison, JudgesAGradientByWhatMicrobatchesContributedToIt) {
  // Contributions of 1 and -1 leave 1e-3, with the rounding of 1.
  const TensorsByName expected{{"grad.weight", at::full({1}, 1e-3)}};
  const TensorsByName found{{"grad.weight", at::full({1}, 1e-3 + 4 * kSpacing)}};
  EXPECT_FALSE(gradients(expected, found).is_tolerable());
  EXPECT_TRUE(gradients(expected, found, {.contributions = {{"weight", 1.0}}}).is_tolerable());
}

TEST(Comparison, AToleranceOfZeroLetsOnlyIdenticalTensorsPass) {
  const at::Tensor weight = at::full({3}, 2.0);
  const TensorsByName expected{{"grad.bias", at::full({3}, 1e-15)}, {"grad.weight", weight}};
  EXPECT_TRUE(gradients(expected, expected, {.tolerance = 0}).is_tolerable());
  EXPECT_FALSE(gradients(expected, {{"grad.bias", at::full({3}, 2e-15)}, {"grad.weight", weight}}, {.tolerance = 0})
                   .is_tolerable());
}

TEST(Comparison, InfinityAndNanAgreeOnlyWithThemselves) {
  const double infinity = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const TensorsByName expected{{"grad.x", at::tensor({1.0, infinity, nan}, at::kFloat)}};
  EXPECT_TRUE(
      gradients(expected, {{"grad.x", at::tensor({1.0 + kSpacing, infinity, nan}, at::kFloat)}}).is_tolerable());
  EXPECT_FALSE(gradients(expected, {{"grad.x", at::tensor({1.0, -infinity, nan}, at::kFloat)}}).is_tolerable());
  EXPECT_FALSE(gradients(expected, {{"grad.x", at::tensor({1.0, infinity, 0.0}, at::kFloat)}}).is_tolerable());
}

TEST(Comparison, OtherShapesAndDtypesAreNotTolerable) {
  EXPECT_FALSE(gradients({{"grad.x", at::ones({2})}}, {{"grad.x", at::ones({2, 1})}}).is_tolerable());
  EXPECT_FALSE(gradients({{"grad.x", at::ones({2})}}, {{"grad.x", at::ones({2}, at::kDouble)}}).is_tolerable());
}

TEST(Comparison, NamesATensorThatOnlyOneSideHas) {
  const TensorsByName one{{"grad.x", at::ones({2})}};
  const auto message = [&](const TensorsByName& expected, const TensorsByName& found) {
    return testing::message_of<ProgramError>([&] { gradients(expected, found); });
  };
  EXPECT_EQ(message(one, {}), "grad.x is missing from the results of the pipeline.");
  EXPECT_EQ(message({}, one), "grad.x is a result of the pipeline, but not of one process.");
}

}  // namespace
}  // namespace penstock::internal::cli
