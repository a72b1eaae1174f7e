// The GPT in stages: the same weights and results for every cut.
#include "penstock/train/gpt.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "penstock/tensor/random_scope.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

const GptOptions kSmall{.layers = 3, .width = 16, .heads = 2, .length = 8, .dropout = 0.25};

std::map<std::string, at::Tensor> by_name(const StageModule& module) {
  return {module.parameters.begin(), module.parameters.end()};
}

TEST(Gpt, HasTheSameWeightsInEveryCut) {
  const Gpt gpt(kSmall, /*seed=*/3);
  const auto training = std::make_shared<bool>(true);
  const std::map<std::string, at::Tensor> whole = by_name(gpt.stage(0, gpt.layers(), training));
  EXPECT_EQ(whole.size(), gpt.parameter_names().size());
  for (const int stages : {2, 3, 5}) {
    const std::vector<int> cut = gpt.cut(stages);
    std::vector<std::string> names;
    for (std::size_t i = 0; i + 1 < cut.size(); ++i) {
      for (const auto& [name, tensor] : gpt.stage(cut[i], cut[i + 1], training).parameters) {
        names.push_back(name);
        EXPECT_TRUE(same(whole.at(name), tensor)) << name;
      }
    }
    EXPECT_EQ(names, gpt.parameter_names());
  }
  const Gpt other(kSmall, /*seed=*/4);
  EXPECT_FALSE(at::equal(whole.at("head.weight"), by_name(other.stage(0, other.layers(), training)).at("head.weight")));
}

TEST(Gpt, HasTheSameDropoutInEveryCut) {
  const Gpt gpt(kSmall, /*seed=*/3);
  const auto training = std::make_shared<bool>(true);
  const at::Tensor ids = at::arange(16).view({2, 8});
  const auto run = [&](int stages) {
    const std::vector<int> cut = gpt.cut(stages);
    c10::IValue x = ids;
    for (std::size_t i = 0; i + 1 < cut.size(); ++i) {
      const RandomScope scope(/*seed=*/1, /*step=*/2, /*microbatch=*/3, /*place=*/static_cast<std::int64_t>(i));
      x = gpt.stage(cut[i], cut[i + 1], training).forward({x}, {});
    }
    return x.toTensor();
  };
  const at::Tensor whole = run(1);
  EXPECT_EQ(whole.sizes(), (std::vector<std::int64_t>{2, 8, kVocabulary}));
  for (const int stages : {2, 4, 5}) EXPECT_TRUE(same(whole, run(stages))) << stages;
  *training = false;
  const at::Tensor evaluated = run(1);
  EXPECT_FALSE(at::equal(whole, evaluated));
  EXPECT_TRUE(same(evaluated, run(3)));
}

TEST(Gpt, IsCutIntoStagesOfEqualCost) {
  const Gpt gpt({.layers = 4, .width = 64, .heads = 4, .length = 32}, /*seed=*/0);
  EXPECT_EQ(gpt.cut(1), (std::vector<int>{0, 6}));
  EXPECT_EQ(gpt.cut(2), (std::vector<int>{0, 3, 6}));
  EXPECT_EQ(gpt.cut(6), (std::vector<int>{0, 1, 2, 3, 4, 5, 6}));
  expect_error<std::invalid_argument>([&] { gpt.cut(7); },
                                      "a GPT of 4 layers cannot be cut into 7 stages: with the embedding and the head "
                                      "there are 6 layers.");
}

TEST(Gpt, RefusesInvalidOptions) {
  const auto refused = [](const GptOptions& options, const std::string& message) {
    expect_error<std::invalid_argument>([&] { Gpt(options, 0); }, message);
  };
  refused({.width = 10, .heads = 4},
          "a GPT cannot have 4 heads for a width of 10: the width must be divisible by the heads.");
  refused({.length = 0}, "a GPT cannot have texts of 0 bytes.");
  refused({.dropout = 1}, "a GPT cannot have a dropout of 1.000000: expected at least 0 and less than 1.");
}

}  // namespace
}  // namespace penstock::internal::testing
