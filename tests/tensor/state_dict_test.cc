// Tests how the tensors of a file are compared with those of a model.
#include "penstock/tensor/state_dict.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

using Found = std::map<std::string, at::Tensor>;

std::vector<ModelTensor> small_model() {
  return {{.names = {"weight"}, .tensor = at::zeros({2, 3}).requires_grad_()},
          {.names = {"embedding", "head"}, .tensor = at::zeros({4})},
          {.names = {"mask"}, .tensor = at::zeros({1}), .is_required = false}};
}

TEST(StateDict, IsLoadedInPlace) {
  const std::vector<ModelTensor> model = small_model();
  const Found found{{"weight", counting({2, 3})}, {"embedding", counting({4})}, {"head", counting({4})}};
  ASSERT_EQ(state_differences(model, found), "");
  load_state(model, found);
  EXPECT_TRUE(same(counting({2, 3}), model[0].tensor.detach()));
  EXPECT_TRUE(same(counting({4}), model[1].tensor));
  EXPECT_TRUE(same(at::zeros({1}), model[2].tensor));
  EXPECT_TRUE(model[0].tensor.requires_grad());
}

TEST(StateDict, NeedsOneNameOfATiedParameter) {
  for (const std::string name : {"embedding", "head"}) {
    const std::vector<ModelTensor> model = small_model();
    const Found found{{"weight", counting({2, 3})}, {name, counting({4})}, {"mask", at::ones({1})}};
    ASSERT_EQ(state_differences(model, found), "");
    load_state(model, found);
    EXPECT_TRUE(same(counting({4}), model[1].tensor));
    EXPECT_TRUE(same(at::ones({1}), model[2].tensor));
  }
}

TEST(StateDict, NamesWhatDiffers) {
  EXPECT_EQ(state_differences(small_model(), {{"weight", at::ones({3, 2})}, {"tail", at::ones({1})}}),
            "  tensor 'weight': found float32[3, 2], expected float32[2, 3].\n"
            "  tensor 'embedding' is missing: the model has float32[4].\n"
            "  tensor 'tail' is unexpected: found float32[1].");
  EXPECT_EQ(state_differences(small_model(), {{"weight", at::ones({2, 3}, at::kBFloat16)}, {"head", at::ones({4})}}),
            "  tensor 'weight': found bfloat16[2, 3], expected float32[2, 3].");
  EXPECT_EQ(state_differences(small_model(),
                              {{"weight", at::ones({2, 3})}, {"head", at::ones({4})}, {"mask", at::ones({2})}}),
            "  tensor 'mask': found float32[2], expected float32[1].");
}

TEST(StateDict, ComparesTheValuesOfTiedNames) {
  const at::Tensor nan = at::full({4}, std::numeric_limits<float>::quiet_NaN());
  const Found same_bits{{"weight", at::ones({2, 3})}, {"embedding", nan}, {"head", nan.clone()}};
  EXPECT_EQ(state_differences(small_model(), same_bits), "");
  const Found other_bits{{"weight", at::ones({2, 3})}, {"embedding", at::ones({4})}, {"head", at::zeros({4})}};
  EXPECT_EQ(state_differences(small_model(), other_bits),
            "  tensor 'head' is tied to tensor 'embedding' in the model, and has other values.");
}

TEST(StateDict, ComparesValuesThatShareMemory) {
  const at::Tensor whole = counting({6});
  const std::vector<ModelTensor> model{{.names = {"whole"}, .tensor = whole},
                                       {.names = {"part"}, .tensor = whole.narrow(0, 2, 3)},
                                       {.names = {"spread"}, .tensor = at::zeros({1, 2}).expand({3, 2})}};
  const at::Tensor spread = counting({1, 2}).expand({3, 2}).contiguous();
  const Found fitting{
      {"whole", at::arange(10, 16, at::kFloat)}, {"part", at::arange(12, 15, at::kFloat)}, {"spread", spread}};
  ASSERT_EQ(state_differences(model, fitting), "");
  EXPECT_TRUE(same(counting({6}), whole)) << "comparing changes nothing";
  load_state(model, fitting);
  EXPECT_TRUE(same(fitting.at("whole"), whole));
  EXPECT_TRUE(same(spread, model[2].tensor.contiguous()));

  Found other = fitting;
  other["part"] = at::zeros({3});
  EXPECT_EQ(state_differences(model, other),
            "  tensor 'whole' shares memory in the model, and its values contradict that.");
  other = fitting;
  other["spread"] = counting({3, 2});
  EXPECT_EQ(state_differences(model, other),
            "  tensor 'spread' shares memory in the model, and its values contradict that.");
}

TEST(StateDict, ListsAtMostTenLinesWithSomeOfEachKind) {
  std::vector<ModelTensor> model;
  Found found;
  for (int i = 0; i < 30; ++i) {
    model.push_back({.names = {"a" + std::to_string(i)}, .tensor = at::zeros({1})});
    model.push_back({.names = {"b" + std::to_string(i)}, .tensor = at::zeros({1})});
    found.emplace("a" + std::to_string(i), at::zeros({2}));
    found.emplace("c" + std::to_string(i), at::zeros({1}));
  }
  EXPECT_EQ(state_differences(model, found),
            "  tensor 'a0': found float32[2], expected float32[1].\n"
            "  tensor 'a1': found float32[2], expected float32[1].\n"
            "  … and 28 more have another shape or dtype.\n"
            "  tensor 'b0' is missing: the model has float32[1].\n"
            "  tensor 'b1' is missing: the model has float32[1].\n"
            "  … and 28 more are missing.\n"
            "  tensor 'c0' is unexpected: found float32[1].\n"
            "  tensor 'c1' is unexpected: found float32[1].\n"
            "  … and 28 more are unexpected.");
  // Ten differences of one kind have ten lines.
  const std::vector<ModelTensor> ten(model.begin(), model.begin() + 10);
  const std::string missing = state_differences(ten, {});
  EXPECT_EQ(std::ranges::count(missing, '\n'), 9);
  EXPECT_EQ(missing.find("more"), std::string::npos);
}

TEST(StateDict, EscapesNamesOfAFile) {
  EXPECT_EQ(state_differences({}, {{"a\x1b[2J", at::ones({1})}}).find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace penstock::internal::testing
