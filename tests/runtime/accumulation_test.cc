// Gradients accumulated over several steps, of which not all reduce.
#include "tests/runtime/accumulation.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/chunk_spec.h"
#include "tests/runtime/models.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

class EveryAccumulation : public ::testing::TestWithParam<AccumulationCase> {};
INSTANTIATE_TEST_SUITE_P(Threads, EveryAccumulation, ::testing::ValuesIn(accumulation_cases()),
                         [](const auto& one) { return "replicas_" + one.param.name(); });

TEST_P(EveryAccumulation, GivesTheGradientsOfOneProcessWhateverIsCleared) {
  if (GetParam().sharing == Sharing::OneTensor && test_device(0) != test_device(1)) {
    GTEST_SKIP() << "one tensor is on one device";
  }
  for (unsigned seed = 0; seed < 8; ++seed) {
    expect_accumulation_of_one_process(GetParam(), seed);
    if (HasFailure()) return;
  }
}

// A pipeline of AddingModels with one microbatch in each replica.
struct Adding {
  explicit Adding(const AccumulationCase& given, std::optional<c10::IValue> merge_spec = std::nullopt) : config(given) {
    PipelineOptions options{
        .loss = [](const c10::IValue& output, const c10::IValue&, const Kwargs&) { return output.toTensor().sum(); },
        .scale_grads = false,
        .sharded = config.sharded};
    options.output_merge_spec = std::move(merge_spec);
    std::vector<StagedModel> replicas;
    for (int i = 0; i < config.replicas; ++i) {
      Model model = AddingModel(config.sharing == Sharing::OneTensor).model();
      if (config.sharing == Sharing::Copies) model.copies = {{{0, "tied"}, {1, "tied"}}};
      replicas.push_back(model.build());
    }
    pipeline =
        std::make_unique<Pipeline>(std::move(replicas), generate("GPipe", {.ranks = 2, .microbatches = 1}), options);
  }

  // Runs a step in which the gradient of a parameter is its pattern times the factor of each stage.
  void step(const std::string& name, std::array<float, 2> factors, bool reduce = true) {
    at::Tensor x = at::zeros({config.replicas, AddingModel::kColumns});
    for (std::size_t stage = 0; stage < 2; ++stage) {
      for (std::size_t i = 0; i < AddingModel::kNames.size(); ++i) {
        if (AddingModel::kNames[i] == name) {
          x.select(1, static_cast<std::int64_t>(stage * AddingModel::kNames.size() + i)).fill_(factors[stage]);
        }
      }
    }
    StepOptions options;
    options.reduce = reduce;
    pipeline->step({x}, {}, at::Tensor(), options);
  }

  const at::Tensor& parameter(std::size_t stage, const std::string& name, int replica = 0) const {
    for (const auto& [own, parameter] : pipeline->stages(replica)[stage].parameters()) {
      if (own == name) return parameter;
    }
    throw std::logic_error(name);
  }

  AccumulationCase config;
  std::unique_ptr<Pipeline> pipeline;
};

TEST(Accumulation, OfCopiesKeepsTheReducedPartWhereAStepGivesNoGradient) {
  Adding adding({.replicas = 1, .sharing = Sharing::Copies});
  const at::Tensor pattern = AddingModel::pattern("tied");
  adding.step("tied", {2, 2});
  adding.step("tied", {0, 2}, /*reduce=*/false);
  adding.step("tied", {1, 1});
  EXPECT_TRUE(same_tensor(adding.parameter(0, "tied").grad(), 8 * pattern)) << adding.parameter(0, "tied").grad();
  EXPECT_TRUE(same_tensor(adding.parameter(1, "tied").grad(), 8 * pattern)) << adding.parameter(1, "tied").grad();
}

TEST(Accumulation, ShowsTheReducedPartAndTheUnreducedPartOfThisRank) {
  const at::Tensor pattern = AddingModel::pattern("long");
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded ? "sharded" : "replicated");
    Adding adding({.replicas = 2, .sharded = sharded});
    adding.step("long", {2, 2}, /*reduce=*/false);
    for (const float total : {2.0F, 6.0F, 8.0F}) {
      if (total == 6.0F) adding.step("long", {4, 4});
      if (total == 8.0F) adding.step("long", {2, 2}, /*reduce=*/false);
      for (int replica = 0; replica < 2; ++replica) {
        const at::Tensor expected =
            sharded ? at::constant_pad_nd(pattern, {0, 1}).narrow(0, std::int64_t{3} * replica, 3) : pattern;
        const at::Tensor found = adding.parameter(0, "long", replica).grad();
        EXPECT_TRUE(same_tensor(found, total * expected)) << total << ", replica " << replica << ": " << found;
      }
    }
  }
}

TEST(Accumulation, AcceptsAChangeOfAGradientThatHasOnePart) {
  const at::Tensor pattern = AddingModel::pattern("long");
  Adding adding({.replicas = 2});
  const auto scale = [&](double factor) {
    for (int replica = 0; replica < 2; ++replica) adding.parameter(0, "long", replica).mutable_grad().mul_(factor);
  };
  adding.step("long", {2, 0}, /*reduce=*/false);
  scale(3);
  adding.step("long", {2, 0});
  EXPECT_TRUE(same_tensor(adding.parameter(0, "long").grad(), 8 * pattern));
  scale(0.5);
  adding.step("long", {2, 0});
  EXPECT_TRUE(same_tensor(adding.parameter(0, "long").grad(), 6 * pattern));
  // Written to with the same values, as clipping does.
  adding.step("long", {2, 0}, /*reduce=*/false);
  scale(1);
  adding.step("long", {2, 0});
  EXPECT_TRUE(same_tensor(adding.parameter(0, "long").grad(), 10 * pattern));
}

TEST(Accumulation, RefusesAChangeOfASumOfBothParts) {
  for (const AccumulationCase& config :
       {AccumulationCase{.replicas = 2}, AccumulationCase{.replicas = 2, .sharded = true},
        AccumulationCase{.replicas = 1, .sharing = Sharing::Copies}}) {
    SCOPED_TRACE(config.name());
    const std::string name = config.sharing == Sharing::None ? "long" : "tied";
    Adding adding(config);
    adding.step(name, {2, 2});
    adding.step(name, {2, 2}, /*reduce=*/false);
    const at::Tensor gradient = adding.parameter(1, name).grad();
    const at::Tensor before = gradient.clone();
    gradient.mul_(2);
    EXPECT_EQ(message_of<PipelineError>([&] { adding.step(name, {2, 2}); }),
              "stage 1, parameter '" + name +
                  "': .grad was changed while it holds what a step without a reduction has contributed; expected it to "
                  "be as that step left it, none, or zero.\n"
                  "  Hint: scale or clip gradients after a step that reduces them, or clear them first.");
    EXPECT_TRUE(adding.parameter(1, name).grad().is_same(gradient));
    EXPECT_TRUE(same_tensor(gradient, before * 2));
    // After the change is reverted, the next step succeeds.
    gradient.copy_(before);
    adding.step(name, {2, 2});
    const double sum = config.sharing == Sharing::None ? 6 : 12;
    const at::Tensor pattern = AddingModel::pattern(name).narrow(0, 0, gradient.numel());
    EXPECT_TRUE(same_tensor(adding.parameter(1, name).grad(), sum * pattern)) << adding.parameter(1, name).grad();
  }
}

// A reduction also sums gradients to which its own step has added nothing.
TEST(Accumulation, IsRestoredWhenAStepFailsAfterItsReduction) {
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded ? "sharded" : "replicated");
    const auto fails = std::make_shared<std::atomic<bool>>(false);
    Adding adding({.replicas = 2, .sharded = sharded},
                  CustomReducer(at::zeros({}), [fails](const c10::IValue& sum, const c10::IValue&) -> c10::IValue {
                    if (*fails) throw std::runtime_error("no sum");
                    return sum;
                  }));
    adding.step("long", {2, 2}, /*reduce=*/false);
    // Unlike in the other replica, so that their average shows.
    if (!sharded) adding.parameter(0, "long", 1).mutable_grad().mul_(3);
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> before;
    for (int replica = 0; replica < 2; ++replica) {
      gradients.push_back(adding.parameter(0, "long", replica).grad());
      before.push_back(gradients.back().clone());
    }
    *fails = true;
    EXPECT_THROW(adding.step("one", {1, 1}), ChunkError);
    for (int replica = 0; replica < 2; ++replica) {
      const at::Tensor found = adding.parameter(0, "long", replica).grad();
      const auto index = static_cast<std::size_t>(replica);
      EXPECT_TRUE(found.is_same(gradients[index])) << replica;
      EXPECT_TRUE(same_tensor(found, before[index])) << replica << ": " << found << ", before: " << before[index];
    }
    *fails = false;
    adding.step("one", {1, 1});
    const double sum = sharded ? 2 : 4;
    const at::Tensor pattern = AddingModel::pattern("long").narrow(0, 0, gradients[0].numel());
    EXPECT_TRUE(same_tensor(adding.parameter(0, "long").grad(), sum * pattern)) << adding.parameter(0, "long").grad();
  }
}

}  // namespace
}  // namespace penstock::internal::testing
