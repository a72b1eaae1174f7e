// Tests of cases that torch.distributed.pipelining gets wrong in a step. Each test is named for what holds here.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/tensor/chunk_spec.h"
#include "penstock/torch_names.h"
#include "tests/runtime/models.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

TEST(TorchRegressions, TwoAccumulatedStepsAreTheSum) {
  const Model model = perceptron(2);
  Schedule1F1B pipeline(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const std::vector<at::Tensor> once = clones(gradients_of(model));
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const std::vector<at::Tensor> twice = gradients_of(model);
  for (std::size_t i = 0; i < once.size(); ++i) EXPECT_TRUE(at::allclose(once[i] * 2, twice[i], 1e-5, 1e-8));
}

TEST(TorchRegressions, EvaluationLeavesGradientsUntouched) {
  const Model model = perceptron(2);
  ScheduleGPipe pipeline(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const std::vector<at::Tensor> before = clones(gradients_of(model));
  pipeline.eval({rows(8, "x")}, {}, rows(8, "y"));
  expect_equal(before, gradients_of(model));
}

TEST(TorchRegressions, EvaluationOfAVPlacementRuns) {
  for (const char* name : {"ZBVZeroBubble", "DualPipeV"}) {
    const Model model = perceptron(4);
    Pipeline pipeline = get_schedule_class(name)(model.build(), 4, {.loss = squared_error});
    EXPECT_EQ(pipeline.eval({rows(8, "x")}).output.toTensor().size(0), 8) << name;
  }
}

TEST(TorchRegressions, LaterBatchesMayBeLarger) {
  const Model model = perceptron(2);
  Schedule1F1B pipeline(model.build(), 4, {.loss = squared_error});
  for (const std::int64_t count : {8, 16, 5, 31, 4}) {
    const StepResult result = pipeline.step({rows(count, "x")}, {}, rows(count, "y"));
    EXPECT_EQ(result.output.toTensor().size(0), count);
  }
}

TEST(TorchRegressions, DictOutputsAreMerged) {
  Model model = perceptron(2);
  const auto before = model.stages[1].forward;
  model.stages[1].forward = [before](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    const at::Tensor logits = before(args, kwargs).toTensor();
    return dict({{"logits", logits}, {"more", list({logits.argmax(-1), logits.sum(-1)})}});
  };
  Schedule1F1B pipeline(model.build(), 2,
                        {.loss = [](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
                          return at::mse_loss(output.toGenericDict().at("logits").toTensor(), target.toTensor());
                        }});
  const c10::IValue output = pipeline.step({rows(6, "x")}, {}, rows(6, "y")).output;
  EXPECT_EQ(output.toGenericDict().at("logits").toTensor().size(0), 6);
  EXPECT_EQ(output.toGenericDict().at("more").toListRef()[0].toTensor().size(0), 6);
  EXPECT_TRUE(model.stages[0].parameters[0].second.grad().defined());
}

TEST(TorchRegressions, NestedTargetsAreSplit) {
  const Model model = perceptron(2);
  PipelineOptions options;
  options.loss = [](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    const auto parts = target.toGenericDict();
    return at::mse_loss(output.toTensor(), parts.at("y").toTensor()) * parts.at("factor").toDouble();
  };
  Schedule1F1B pipeline(model.build(), 2, options);
  const StepResult result = pipeline.step({rows(6, "x")}, {}, dict({{"y", rows(6, "y")}, {"factor", 2.0}}));
  const StepResult plain =
      Schedule1F1B(model.build(), 2, {.loss = squared_error}).step({rows(6, "x")}, {}, rows(6, "y"));
  EXPECT_TRUE(same_tensor(plain.losses[1] * 2, result.losses[1]));
}

TEST(TorchRegressions, MicrobatchesMayComeOutOfOrder) {
  const Schedule schedule = lower(parse_csv("0F0,0F1,0F2,0B2,0B0,0B1\n1F2,1F0,1F1,1B2,1B0,1B1\n"));
  const Model model = perceptron(2);
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  const StepResult result = pipeline.step({rows(6, "x")}, {}, rows(6, "y"));
  const std::vector<at::Tensor> found = clones(gradients_of(model));
  const Model again = perceptron(2);
  Schedule1F1B in_order(again.build(), 3, {.loss = squared_error});
  const StepResult expected = in_order.step({rows(6, "x")}, {}, rows(6, "y"));
  EXPECT_TRUE(same(expected.output, result.output));
  expect_equal(expected.losses, result.losses);
  const std::vector<at::Tensor> gradients = gradients_of(again);
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::allclose(gradients[i], found[i], 1e-5, 1e-8));
}

TEST(TorchRegressions, ZeroBubbleComputesWeightGradientsAfterAFrozenStage) {
  const Model model = perceptron(4);
  for (const auto& [name, parameter] : model.stages[0].parameters) parameter.requires_grad_(false);
  for (const char* name : {"ZBVZeroBubble", "InterleavedZeroBubble"}) {
    zero_grad(model);
    Pipeline pipeline = get_schedule_class(name)(model.build(), 4, {.loss = squared_error}, 2);
    pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
    EXPECT_FALSE(model.stages[0].parameters[0].second.grad().defined());
    for (std::size_t stage = 1; stage < 4; ++stage) {
      for (const auto& [parameter_name, parameter] : model.stages[stage].parameters) {
        EXPECT_TRUE(parameter.grad().defined()) << name << ", stage " << stage << ", " << parameter_name;
      }
    }
  }
}

TEST(TorchRegressions, ModulesRunOnceForEachMicrobatch) {
  Model model = perceptron(2);
  const auto calls = std::make_shared<std::atomic<int>>(0);
  const auto before = model.stages[1].forward;
  model.stages[1].forward = [=](const Args& args, const Kwargs& kwargs) {
    ++*calls;
    return before(args, kwargs);
  };
  Schedule1F1B pipeline(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_EQ(*calls, 4);
}

TEST(TorchRegressions, ActivationsMayBeFlagsOrIndices) {
  Model model = perceptron(2);
  const at::Tensor table = weight("table", {5, kWide}, test_device(1));
  model.stages[0].forward = [](const Args& args, const Kwargs&) -> c10::IValue {
    return (args[0].toTensor().sum(-1) * 1000).to(at::kLong).remainder(5);
  };
  model.stages[1] = {.forward = [table](const Args& args, const Kwargs&) -> c10::IValue {
                       return at::embedding(table, args[0].toTensor());
                     },
                     .parameters = {{"table", table}}};
  ScheduleGPipe pipeline(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_TRUE(table.grad().defined());
}

TEST(TorchRegressions, ZeroBubbleTrainsParametersThatNoInputReaches) {
  Model model = perceptron(4);
  // Each stage but the last returns a second output that depends on a parameter alone.
  for (std::size_t i = 0; i < 4; ++i) {
    const at::Tensor own = weight(numbered("own", static_cast<int>(i)), {kWide}, test_device(static_cast<int>(i)));
    const auto before = model.stages[i].forward;
    model.stages[i].forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      at::Tensor y = before(args, kwargs).toTensor();
      if (i > 0) y = y * tensor(args, 1);
      if (i == 3) return y + own;
      return c10::ivalue::Tuple::create({y, at::sigmoid(own)});
    };
    model.stages[i].parameters.emplace_back("own", own);
  }
  for (const char* name : {"GPipe", "ZBVZeroBubble", "InterleavedZeroBubble"}) {
    zero_grad(model);
    Pipeline pipeline = get_schedule_class(name)(model.build(), 4, {.loss = squared_error}, name[0] == 'G' ? 4 : 2);
    pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
    const auto sums = added_up(pipeline.schedule(), plain(model, rows(8, "x"), rows(8, "y"), 4, {}));
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(same_tensor(sums[i].back(), model.stages[i].parameters.back().second.grad())) << name << ", " << i;
    }
  }
}

TEST(TorchRegressions, UnevenMicrobatchesHaveTheGivenRowsAlone) {
  const Schedule schedule = generate("ForwardOnly", {.ranks = 3, .microbatches = 4});
  const Model model = perceptron(schedule.stages());
  Pipeline pipeline(model.build(), schedule);
  for (const std::int64_t count : {10, 7, 4, 11}) {
    const at::Tensor x = rows(count, "x");
    const at::Tensor expected = outputs_of(plain(model, x, x, 4, {.backward = false}));
    EXPECT_TRUE(same(expected, pipeline.eval({x}).output)) << count;
  }
}

// A function whose backward fails on demand.
struct FailsBackward : torch::autograd::Function<FailsBackward> {
  static inline std::atomic<bool> armed = false;

  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    if (armed) throw std::runtime_error("no way back");
    return gradients;
  }
};

TEST(TorchRegressions, LossesOfAFailedStepDoNotReachTheNext) {
  Model model = perceptron(2);
  const auto before = model.stages[0].forward;
  model.stages[0].forward = [before](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    return FailsBackward::apply(before(args, kwargs).toTensor());
  };
  // All losses have been computed when the first backward of stage 0 fails.
  ScheduleGPipe pipeline(model.build(), 4, {.loss = squared_error});
  FailsBackward::armed = true;
  EXPECT_THROW(pipeline.step({rows(8, "other x")}, {}, rows(8, "other y")), PipelineError);
  FailsBackward::armed = false;
  const StepResult found = pipeline.step({rows(8, "x")}, {}, rows(8, "y"));

  const Model again = perceptron(2);
  ScheduleGPipe fresh(again.build(), 4, {.loss = squared_error});
  const StepResult expected = fresh.step({rows(8, "x")}, {}, rows(8, "y"));
  expect_equal(expected.losses, found.losses);
  expect_equal(gradients_of(again), gradients_of(model));
}

TEST(TorchRegressions, EvaluationWithALossNeedsNoTarget) {
  const Model model = perceptron(2);
  ScheduleGPipe pipeline(model.build(), 2, {.loss = squared_error});
  const StepResult result = pipeline.eval({rows(4, "x")});
  EXPECT_EQ(result.output.toTensor().size(0), 4);
  EXPECT_TRUE(result.losses.empty());
}

TEST(TorchRegressions, EvaluationFreesWhatItsForwardsMade) {
  const Model model = perceptron(4);
  Pipeline pipeline = get_schedule_class("ZBVZeroBubble")(model.build(), 4, {.loss = squared_error});
  pipeline.eval({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_FALSE(features_of(pipeline.recorded_schedule()).backward);
  for (const PipelineStage& stage : pipeline.stages()) {
    for (int i = 0; i < 4; ++i) EXPECT_FALSE(stage.has_saved_activations(i));
  }
}

// Stages that return a non-contiguous view: a transpose, or a slice of a wider tensor.
Model of_views(int stages, const StageDevices& devices) {
  Model model = perceptron(stages, devices);
  for (std::size_t i = 0; i < model.stages.size(); ++i) {
    const auto before = model.stages[i].forward;
    model.stages[i].forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      const at::Tensor y = before(args, kwargs).toTensor();
      return i % 2 == 0 ? y.t().contiguous().t() : at::cat({y, tensor(args, 0)}, 1).slice(1, 0, kWide);
    };
  }
  return model;
}

TEST(TorchRegressions, ViewsAndNonContiguousTensorsWorkInZeroBubble) {
  for (const char* name : {"ZBVZeroBubble", "InterleavedZeroBubble", "1F1B"}) {
    SCOPED_TRACE(name);
    expect_what_one_process_gives({"of_views", of_views}, generate(name, {.ranks = 2, .microbatches = 4}));
  }
}

// The last stage returns a view of its input, and the one before it a parameter.
Model of_nothing_new(int stages, const StageDevices& devices) {
  Model model = perceptron(stages, devices);
  const at::Tensor own = weight("whole", {2, kWide}, devices(stages - 2));
  model.stages[static_cast<std::size_t>(stages) - 2] = {
      .forward = [own](const Args& args, const Kwargs&) -> c10::IValue {
        return c10::ivalue::Tuple::create({args[0], own});
      },
      .parameters = {{"own", own}}};
  model.stages.back() = {.forward = [](const Args& args, const Kwargs&) -> c10::IValue {
    return tensor(args, 0).mul_(tensor(args, 1).mean(0)).view({-1, kWide});
  }};
  return model;
}

TEST(TorchRegressions, OutputsMayBeInputsOrParametersInZeroBubble) {
  for (const char* name : {"ZBVZeroBubble", "InterleavedZeroBubble", "DualPipeV"}) {
    SCOPED_TRACE(name);
    expect_what_one_process_gives({"of_nothing_new", of_nothing_new}, generate(name, {.ranks = 2, .microbatches = 4}));
  }
}

TEST(TorchRegressions, LossesMayTakeNoTarget) {
  const Model model = perceptron(2);
  Schedule1F1B pipeline(model.build(), 2,
                        {.loss = [](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
                          EXPECT_FALSE(target.toTensor().defined());
                          return output.toTensor().square().mean();
                        }});
  EXPECT_EQ(pipeline.step({rows(4, "x")}, {}, at::Tensor()).losses.size(), 2U);
  EXPECT_TRUE(model.stages[0].parameters[0].second.grad().defined());
}

TEST(TorchRegressions, ZeroBubbleCallsTheHooksOfParameters) {
  const Model model = perceptron(4);
  const auto calls = std::make_shared<std::atomic<int>>(0);
  for (const StageModule& stage : model.stages) {
    stage.parameters[0].second.register_hook([calls](const at::Tensor& gradient) {
      ++*calls;
      return gradient * 2;
    });
  }
  Pipeline pipeline = get_schedule_class("ZBVZeroBubble")(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_EQ(*calls, 4 * 4);
  const auto sums = added_up(pipeline.schedule(), plain(perceptron(4), rows(8, "x"), rows(8, "y"), 4, {}));
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(same(sums[i][0] * 2, model.stages[i].parameters[0].second.grad())) << i;
  }
}

struct CountsBackwards : torch::autograd::Function<CountsBackwards> {
  static inline std::atomic<int> calls = 0;

  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& w) {
    return x + w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    ++calls;
    return {gradients[0], gradients[0].sum(0)};
  }
};

TEST(TorchRegressions, ZeroBubbleRunsCustomFunctionsOnce) {
  Model model = perceptron(4);
  for (std::size_t i = 0; i < 4; ++i) {
    const auto before = model.stages[i].forward;
    const at::Tensor b = model.stages[i].parameters[1].second;
    model.stages[i].forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      return CountsBackwards::apply(before(args, kwargs).toTensor(), b);
    };
  }
  CountsBackwards::calls = 0;
  Pipeline pipeline = get_schedule_class("ZBVZeroBubble")(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_EQ(CountsBackwards::calls, 4 * 4);
}

TEST(TorchRegressions, LoopedBFSTakesChunkSpecs) {
  // The batch dimension is the second one.
  Model model = perceptron(4);
  const auto before = model.stages[0].forward;
  model.stages[0].forward = [before](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    return before({tensor(args, 0).t().contiguous() * kwargs.at("factor").toTensor().t()}, {});
  };
  PipelineOptions options{.loss = squared_error};
  options.specs.args = tuple({TensorChunkSpec(1)});
  options.specs.kwargs = dict({{"factor", TensorChunkSpec(1)}});
  Pipeline pipeline = get_schedule_class("LoopedBFS")(model.build(), 4, options);
  const at::Tensor x = rows(8, "x");
  const StepResult found = pipeline.step({x.t().contiguous()}, {{"factor", at::ones({1, 8})}}, rows(8, "y"));
  expect_equal({outputs_of(plain(perceptron(4), x, rows(8, "y"), 4, {}))}, {found.output.toTensor()});
}

TEST(TorchRegressions, FunctionsForActionsSeeTheKwargsOfTheLoss) {
  const Model model = perceptron(2);
  std::atomic<int> seen = 0;
  PipelineOptions options;
  options.loss = [](const c10::IValue& output, const c10::IValue& target, const Kwargs& kwargs) {
    return at::mse_loss(output.toTensor(), target.toTensor()) * kwargs.at("factor").toDouble();
  };
  options.functions.overrides[Computation::Forward] = [&](const Action& action, ActionContext& context) {
    if (context.options().loss_kwargs.at("factor").toDouble() == 3.0 && !context.options().return_outputs) ++seen;
    context.run(action);
  };
  Schedule1F1B pipeline(model.build(), 2, options);
  StepOptions step;
  step.loss_kwargs = {{"factor", 3.0}};
  step.return_outputs = false;
  const StepResult result = pipeline.step({rows(4, "x")}, {}, rows(4, "y"), step);
  EXPECT_EQ(seen, 4);
  EXPECT_TRUE(result.output.isNone());
  const auto expected = plain(perceptron(2), rows(4, "x"), rows(4, "y"), 2, {});
  EXPECT_TRUE(same(expected[1].loss * 3.0, result.losses[1]));
}

TEST(TorchRegressions, GradientsThatDoNotExistAreNotSent) {
  Model model = perceptron(2);
  const auto first = model.stages[0].forward;
  const auto last = model.stages[1].forward;
  model.stages[0].forward = [first](const Args& args, const Kwargs& kwargs) -> c10::IValue {
    const at::Tensor y = first(args, kwargs).toTensor();
    return c10::ivalue::Tuple::create({y, y * 2, y * 3});
  };
  model.stages[1].forward = [last](const Args& args, const Kwargs& kwargs) { return last({args[1]}, kwargs); };
  Schedule1F1B pipeline(model.build(), 4, {.loss = squared_error});
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  constexpr std::int64_t kTensor = 2 * kWide * static_cast<std::int64_t>(sizeof(float));
  for (int rank = 0; rank < 2; ++rank) {
    const auto actions = pipeline.recorded_schedule().actions(rank);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const std::int64_t bytes = pipeline.record()[static_cast<std::size_t>(rank)][i].bytes;
      // All tensors of a stage are sent in one message.
      if (!actions[i].is_send()) continue;
      EXPECT_EQ(bytes, (actions[i].carries_activation() ? 3 : 1) * kTensor) << to_string(actions[i]);
    }
  }
}

TEST(TorchRegressions, GradientsOfTheArgumentsAreKept) {
  const Model model = perceptron(4);
  for (const char* name : {"1F1B", "ZBVZeroBubble", "LoopedBFS"}) {
    const at::Tensor x = rows(8, "x").requires_grad_();
    Pipeline pipeline = get_schedule_class(name)(model.build(), 4, {.loss = squared_error}, name[0] == '1' ? 4 : 2);
    pipeline.step({x}, {}, rows(8, "y"));

    const at::Tensor expected = rows(8, "x").requires_grad_();
    at::mse_loss(forward_of(model, expected).cpu(), rows(8, "y")).backward();
    ASSERT_TRUE(x.grad().defined()) << name;
    EXPECT_TRUE(at::allclose(expected.grad(), x.grad(), 1e-5, 1e-8)) << name;
  }
}

}  // namespace
}  // namespace penstock::internal::testing
