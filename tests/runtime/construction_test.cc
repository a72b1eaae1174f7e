// Construction of pipelines: it succeeds, or throws and changes nothing.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

// Returns a model whose first stage has its weight under two names.
Model with_two_names() {
  Model model = perceptron(2);
  auto& parameters = model.stages[0].parameters;
  parameters.emplace_back("again", parameters[0].second);
  return model;
}

std::vector<StagedModel> stages_of(const std::vector<Model>& models) {
  std::vector<StagedModel> replicas;
  for (const Model& model : models) replicas.push_back(model.build());
  return replicas;
}

Schedule schedule_of_two() {
  return generate("1F1B", {.ranks = 2, .microbatches = 2});
}

TEST(Construction, TakesATensorUnderTwoNamesForOneParameter) {
  const at::Tensor x = rows(8, "x");
  const at::Tensor y = rows(8, "y");
  const auto whole = plain_microbatch(perceptron(2), {x}, y, 0, 1.0, {}).gradients;
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded ? "sharded" : "replicated");
    const std::vector<Model> models{with_two_names(), with_two_names()};
    const std::vector<at::Tensor> before = clones({models[0].stages[0].parameters[0].second});
    Pipeline pipeline(stages_of(models), schedule_of_two(), {.loss = squared_error, .sharded = sharded});
    for (const double times : {1.0, 2.0}) {
      pipeline.step({x}, {}, y);
      std::vector<at::Tensor> parts;
      for (int replica = 0; replica < 2; ++replica) {
        const auto& parameters = pipeline.stages(replica)[0].parameters();
        ASSERT_EQ(parameters.size(), 3U);
        EXPECT_EQ(parameters[0].first, "w");
        EXPECT_EQ(parameters[1].first, "b");
        EXPECT_EQ(parameters[2].first, "again");
        EXPECT_TRUE(parameters[0].second.is_same(parameters[2].second));
        if (sharded || replica == 0) parts.push_back(parameters[0].second.grad().view(-1));
      }
      const at::Tensor found = at::cat(parts).view({kWide, kWide});
      EXPECT_TRUE(at::allclose(found, whole[0][0] * times, 1e-5, 1e-7)) << found - whole[0][0] * times;
    }
  }
}

TEST(Construction, RefusesReplicasThatDifferInWiringOrSharedParameters) {
  const auto error_with = [](const Model& second) {
    return message_of([&] { Pipeline(stages_of({perceptron(3), second}), generate("1F1B", {.ranks = 3})); });
  };
  Model skip = perceptron(3);
  skip.wiring.connect(2, {{1, 0}, {0, 0}});
  EXPECT_EQ(error_with(skip),
            "replica 1 has other wiring than replica 0.\n  Hint: build all replicas of a model in the same way.");
  EXPECT_EQ(
      error_with(shared_across(3)),
      "replica 1 has other shared parameters than replica 0.\n  Hint: build all replicas of a model in the same way.");
}

TEST(Construction, ThatFailsLeavesTheWeightsOfAllReplicas) {
  PENSTOCK_ON_CPU_ALONE("stages on different devices cannot share a storage");
  struct Case {
    std::string error;
    // Changes the last stage of the second replica, or of both, so that it cannot be sharded.
    std::function<void(std::vector<Model>&)> spoil;
  };
  const auto& replace = [](Model& model, const at::Tensor& tensor) { model.stages[1].parameters[1].second = tensor; };
  const std::vector<Case> cases = {
      {"stage 1, parameter 'b': found float64, expected float32, the dtype of the first parameter: the sharded "
       "parameters of a stage have one dtype.",
       [&](std::vector<Model>& models) {
         for (Model& model : models) replace(model, at::ones({kWide}, at::kDouble).requires_grad_());
       }},
      {"stage 1, parameter 'b' is a view or not contiguous; a sharded parameter has a storage of its own.\n"
       "  Hint: make it a contiguous tensor of its own, for example with clone().",
       [&](std::vector<Model>& models) { replace(models[1], at::ones({kWide, 2}).select(1, 0)); }},
      {"stage 1, parameter 'b' shares its storage with stage 0, parameter 'b'; a sharded parameter has a storage of "
       "its own.\n  Hint: give each replica and each parameter a tensor of its own.",
       [&](std::vector<Model>& models) { replace(models[1], models[1].stages[0].parameters[1].second.detach()); }},
      {"stage 1, buffer 'view' shares its storage with stage 0, parameter 'b', which is sharded; a sharded parameter "
       "has a storage of its own.\n  Hint: give each of them a tensor of its own.",
       [&](std::vector<Model>& models) {
         for (Model& model : models) {
           model.stages[1].buffers = {{"view", model.stages[0].parameters[1].second.detach().view({2, -1})}};
         }
       }},
      // A size that differs from the first replica's, which the broadcast of parameters finds.
      {"broadcast: the members' tensors have different sizes or types",
       [&](std::vector<Model>& models) { replace(models[1], at::ones({kWide + 1})); }}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.error);
    std::vector<Model> models{perceptron(2), perceptron(2)};
    // Other weights than the first replica's, so that a broadcast would change them.
    for (StageModule& stage : models[1].stages) {
      for (const auto& [name, parameter] : stage.parameters) parameter.detach().fill_(7);
    }
    one.spoil(models);
    std::vector<at::Tensor> weights;
    for (const Model& model : models) {
      for (const StageModule& stage : model.stages) {
        for (const auto& [name, parameter] : stage.parameters) weights.push_back(parameter);
      }
    }
    const std::vector<at::Tensor> before = clones(weights);
    const std::string error =
        message_of([&] { Pipeline(stages_of(models), schedule_of_two(), {.loss = squared_error, .sharded = true}); });
    EXPECT_EQ(error, one.error);
    for (const at::Tensor& tensor : weights) ASSERT_EQ(tensor.storage().nbytes() >= tensor.nbytes(), true);
    expect_equal(before, weights);
  }
}

}  // namespace
}  // namespace penstock::internal::testing
