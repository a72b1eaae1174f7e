// Inputs, options and results of a step.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/torch_names.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

TEST(Step, WeighsMicrobatchesAndScalesGradients) {
  const Model model = perceptron(2);
  const auto gradients_with = [&](bool scale, std::vector<double> weights) {
    zero_grad(model);
    Schedule1F1B pipeline(model.build(), 2, {.loss = squared_error, .scale_grads = scale});
    StepOptions options;
    options.weights = std::move(weights);
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"), options);
    return clones(gradients_of(model));
  };
  const auto scaled = gradients_with(true, {});
  const auto unscaled = gradients_with(false, {});
  const auto first_only = gradients_with(true, {1, 0});
  const auto second_only = gradients_with(true, {0, 1});
  for (std::size_t i = 0; i < scaled.size(); ++i) {
    EXPECT_TRUE(at::allclose(scaled[i] * 2, unscaled[i], 1e-5, 1e-8));
    EXPECT_TRUE(at::allclose(first_only[i] + second_only[i], unscaled[i], 1e-5, 1e-8));
  }
}

TEST(Step, GivesLaterStagesTheirOwnKeywordArguments) {
  Model model = perceptron(3);
  const auto before = model.stages[1].forward;
  model.stages[1].forward = [before](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    return before(args, {}).toTensor() + kwargs.at("bias").toTensor() * kwargs.at("factor").toDouble();
  };
  Schedule1F1B pipeline(model.build(), 2, {.loss = squared_error});
  StepOptions options;
  options.stage_kwargs[1] = {{"bias", rows(6, "bias")}, {"factor", 2.0}};
  const StepResult found = pipeline.step({rows(6, "x")}, {}, rows(6, "y"), options);
  const Model plain = perceptron(3);
  const at::Tensor middle = forward_of(plain, 1, forward_of(plain, 0, rows(6, "x"))).cpu() + rows(6, "bias") * 2.0;
  EXPECT_TRUE(at::allclose(forward_of(plain, 2, middle).cpu(), found.output.toTensor().cpu(), 1e-5, 1e-6));
}

TEST(Step, TakesTermsOfTheLossFromAnyStage) {
  Model model = perceptron(3);
  const auto before = model.stages[1].forward;
  model.stages[1].forward = [before](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    const c10::IValue output = before(args, kwargs);
    add_loss(output.toTensor().square().mean());
    return output;
  };
  Schedule1F1B pipeline(model.build(), 2, {.loss = squared_error});
  const StepResult result = pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
  ASSERT_EQ(result.loss_terms.size(), 2U);
  EXPECT_EQ(result.loss_terms[1].size(), 1U);

  // The reference has the term in its loss.
  const Model plain = perceptron(3);
  const SplitArgs split = split_args_kwargs_into_chunks({rows(4, "x"), rows(4, "y")}, {}, 2);
  for (const Args& own : split.args) {
    const at::Tensor middle = forward_of(plain, 1, forward_of(plain, 0, own[0].toTensor()));
    const at::Tensor loss = at::mse_loss(forward_of(plain, 2, middle).cpu(), own[1].toTensor());
    ((loss + middle.square().mean().cpu()) * 0.5).backward();
  }
  const auto expected = gradients_of(plain);
  const auto found = gradients_of(model);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::allclose(expected[i], found[i], 1e-5, 1e-7)) << i;
  EXPECT_THROW(add_loss(at::ones({})), StageError);
}

TEST(Step, CallsTheUsersFunctionsAroundAndInPlaceOfActions) {
  const Model model = perceptron(4);
  const Schedule schedule = generate("DualPipeV", {.ranks = 2, .microbatches = 4});
  std::mutex mutex;
  std::multiset<std::string> before;
  std::multiset<std::string> instead;
  PipelineOptions options{.loss = squared_error};
  options.functions.before = [&](int, const Action& action) {
    const std::lock_guard lock(mutex);
    before.insert(to_string(action));
  };
  for (const Computation computation : {Computation::Forward, Computation::Overlap}) {
    options.functions.overrides[computation] = [&](const Action& action, ActionContext& context) {
      {
        const std::lock_guard lock(mutex);
        instead.insert(to_string(action));
      }
      context.run(action);
    };
  }
  Pipeline pipeline(model.build(), schedule, options);
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  std::multiset<std::string> expected;
  std::size_t overlaps = 0;
  for (int rank = 0; rank < 2; ++rank) {
    for (const Action& action : pipeline.schedule().actions(rank)) {
      expected.insert(to_string(action));
      overlaps += action.is_overlap() ? 1 : 0;
    }
  }
  EXPECT_EQ(before, expected);
  // One call for each forward, alone or as part of a pair, and one for each pair.
  EXPECT_EQ(instead.size(), 16 + overlaps);

  const std::vector<at::Tensor> found = clones(gradients_of(model));
  zero_grad(model);
  Pipeline plain(model.build(), schedule, {.loss = squared_error});
  plain.step({rows(8, "x")}, {}, rows(8, "y"));
  expect_equal(gradients_of(model), found);
}

// A weight is cast again after it has changed: no cast is cached between steps.
TEST(Step, RunsUnderTheCallersAutocast) {
  const Model model = perceptron(4);
  Pipeline pipeline(model.build(), generate("ZBVZeroBubble", {.ranks = 2, .microbatches = 3}), {.loss = squared_error});
  const at::Tensor x = rows(6, "x");
  const at::Tensor y = rows(6, "y");
  const at::Tensor full = pipeline.eval({x}, {}, y).output.toTensor();
  for (int step = 0; step < 2; ++step) {
    zero_grad(model);
    const AutocastScope autocast(test_device(0).type(), at::kBFloat16);
    const at::Tensor found = pipeline.step({x}, {}, y).output.toTensor();
    const auto expected = plain(model, x, y, 3, {.step = step});
    EXPECT_TRUE(same_tensor(found, outputs_of(expected)));
    EXPECT_FALSE(same_tensor(found, full));
    const auto gradients = added_up(pipeline.schedule(), expected);
    for (std::size_t i = 0; i < model.stages.size(); ++i) {
      const auto& parameters = model.stages[i].parameters;
      for (std::size_t j = 0; j < parameters.size(); ++j) {
        EXPECT_TRUE(same_tensor(parameters[j].second.grad(), gradients[i][j])) << i << " " << parameters[j].first;
        parameters[j].second.detach().mul_(1.5);
      }
    }
  }
}

// Inference mode of the caller does not extend to the rank threads.
TEST(Step, EvaluatesForACallerInInferenceMode) {
  const Model model = perceptron(2);
  Schedule1F1B pipeline(model.build(), 2, {.loss = squared_error});
  const at::Tensor expected = pipeline.eval({rows(4, "x")}).output.toTensor();
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(same_tensor(pipeline.eval({rows(4, "x")}).output.toTensor(), expected));
  }
  pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
  EXPECT_TRUE(gradients_of(model).front().defined());
}

TEST(Step, LeavesTheBackwardToTheUserIfAsked) {
  const Model model = perceptron(2);
  std::atomic<int> backwards = 0;
  PipelineOptions options{.loss = squared_error};
  options.backward_requires_autograd = false;
  options.functions.overrides[Computation::FullBackward] = [&](const Action& action, ActionContext& context) {
    ++backwards;
    std::vector<Message> gradients = context.take_gradients(action.stage, action.microbatch);
    context.give_gradients(action.stage, action.microbatch,
                           action.stage == 0 ? std::vector<Message>{}
                                             : std::vector<Message>{{at::ones({2, kWide}, test_device(action.stage))}});
  };
  Schedule1F1B pipeline(model.build(), 2, options);
  pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
  EXPECT_EQ(backwards, 4);
  EXPECT_FALSE(model.stages[0].parameters[0].second.grad().defined());
}

TEST(Step, LetsAModuleSupplyItsWeightGradients) {
  // The module's backward computes no gradient of its weight; the function of dw_builder does.
  Model model = perceptron(2);
  const at::Tensor w = weight("supplied", {kWide, kWide}, test_device(1));
  const auto inputs = std::make_shared<std::vector<at::Tensor>>();
  const auto outputs = std::make_shared<std::vector<at::Tensor>>();
  model.stages[1] = {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
                       const at::Tensor x = args[0].toTensor();
                       at::Tensor y = at::matmul(x, w.detach());
                       inputs->push_back(x.detach());
                       y.retain_grad();
                       outputs->push_back(y);
                       return y;
                     },
                     .parameters = {{"w", w}}};
  const auto build = [=]() -> std::function<void()> {
    return [=] {
      const at::Tensor gradient = at::matmul(inputs->front().t(), outputs->front().grad());
      inputs->erase(inputs->begin());
      outputs->erase(outputs->begin());
      w.mutable_grad() = w.grad().defined() ? w.grad() + gradient : gradient;
    };
  };
  std::vector<PipelineStage> stages;
  stages.emplace_back(model.stages[0], 0, 2, StageOptions{.device = test_device(0)});
  StageOptions options{.device = test_device(1)};
  options.dw_builder = build;
  stages.emplace_back(model.stages[1], 1, 2, options);
  Pipeline pipeline(std::move(stages), parse_csv("0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1I1,1W1\n"),
                    {.loss = squared_error});
  pipeline.step({rows(4, "x")}, {}, rows(4, "y"));

  const at::Tensor expected_weight = weight("supplied", {kWide, kWide});
  const Model plain = perceptron(2);
  const at::Tensor middle = forward_of(plain, 0, rows(4, "x")).cpu();
  at::mse_loss(at::matmul(middle, expected_weight), rows(4, "y")).backward();
  EXPECT_TRUE(at::allclose(expected_weight.grad(), w.grad().cpu(), 1e-5, 1e-7));
  EXPECT_TRUE(at::allclose(gradients_of(plain)[0], gradients_of(model)[0], 1e-5, 1e-7));
}

TEST(Step, KeepsNothingOfItsMicrobatches) {
  const Model model = transformer(4);
  Pipeline pipeline = get_schedule_class("ZBVZeroBubble")(model.build(), 4, {.loss = squared_error});
  pipeline.step({weight("x", {8, 4 * kWide}).detach()}, {}, weight("y", {8, 4 * kWide}).detach());
  for (const PipelineStage& stage : pipeline.stages()) {
    for (int i = 0; i < 4; ++i) EXPECT_FALSE(stage.has_saved_activations(i));
  }
}

// A small tensor that stays alive in each microbatch would keep malloc from reusing the memory of large ones.
TEST(Step, SetsAsideMemoryForItsLosses) {
  const Model model = perceptron(2);
  Schedule1F1B pipeline(model.build(), 4, {.loss = squared_error});
  const StepResult result = pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  for (const at::Tensor& loss : result.losses) EXPECT_TRUE(loss.is_alias_of(result.losses[0]));
  const std::vector<at::Tensor> before = clones(result.losses);
  const StepResult again = pipeline.step({rows(8, "x")}, {}, rows(8, "x"));
  EXPECT_FALSE(again.losses[0].is_alias_of(result.losses[0]));
  expect_equal(before, result.losses);
}

TEST(Step, TakesLossesOfDifferentForms) {
  const Model model = perceptron(2);
  PipelineOptions options;
  options.loss = [losses = std::make_shared<int>()](const c10::IValue& output, const c10::IValue& target,
                                                    const Kwargs& kwargs) {
    at::Tensor loss = squared_error(output, target, kwargs);
    switch ((*losses)++) {
      case 1: return loss.to(at::kDouble);
      case 2: return loss.view({1, 1});
      default: return loss;
    }
  };
  const StepResult result = Schedule1F1B(model.build(), 4, options).step({rows(8, "x")}, {}, rows(8, "y"));
  const StepResult plain =
      Schedule1F1B(model.build(), 4, {.loss = squared_error}).step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_TRUE(same_tensor(plain.losses[0], result.losses[0]));
  EXPECT_TRUE(same_tensor(plain.losses[1].to(at::kDouble), result.losses[1]));
  EXPECT_TRUE(same_tensor(plain.losses[2].view({1, 1}), result.losses[2]));
  EXPECT_TRUE(same_tensor(plain.losses[3], result.losses[3]));
}

TEST(Record, HasAllActionsInTheirOrder) {
  PENSTOCK_ON_CPU_ALONE("the messages of a device run beside its computations");
  const Model model = perceptron(4);
  Pipeline pipeline = get_schedule_class("ZBVZeroBubble")(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  for (int rank = 0; rank < 2; ++rank) {
    const auto& own = pipeline.record()[static_cast<std::size_t>(rank)];
    const auto actions = pipeline.recorded_schedule().actions(rank);
    ASSERT_EQ(own.size(), actions.size());
    std::int64_t last = 0;
    for (std::size_t i = 0; i < own.size(); ++i) {
      EXPECT_GE(own[i].start, last);
      EXPECT_GE(own[i].end, own[i].start);
      EXPECT_LE(own[i].waited, own[i].end - own[i].start);
      if (actions[i].is_send()) {
        EXPECT_EQ(own[i].bytes, 2 * kWide * 4);
        EXPECT_EQ(own[i].peer, 1 - rank);
      }
      last = own[i].end;
    }
  }
  const Timeline timeline = timeline_of(pipeline.recorded_schedule(), pipeline.record());
  EXPECT_GT(timeline.makespan, 0);
  EXPECT_GE(timeline.bubble, 0);
  const Costs costs = costs_of(pipeline.recorded_schedule(), pipeline.record());
  EXPECT_EQ(costs.stages.size(), 4U);
  EXPECT_GT(simulate(pipeline.recorded_schedule(), costs).makespan, 0);
}

TEST(ScheduleClasses, RefuseStagesThatCannotBeDividedEvenly) {
  const Model model = perceptron(3);
  try {
    get_schedule_class("interleaved1f1b")(model.build(), 4, {}, 2);
    FAIL() << "no error";
  } catch (const ScheduleError& error) {
    EXPECT_STREQ(
        error.what(),
        "Interleaved1F1B: 3 stages cannot be divided evenly among 2 ranks.\n  Hint: make the number of stages a "
        "multiple of the number of ranks.");
  }
}

}  // namespace
}  // namespace penstock::internal::testing
