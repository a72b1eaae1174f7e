// Failures of thread ranks: their messages, and the state that they leave.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "tests/runtime/models.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

void expect_begins(const std::string& text, const std::string& beginning) {
  EXPECT_EQ(without_devices(text).substr(0, beginning.size()), beginning) << text;
}

// A model of four stages, of which stage 2 fails on demand.
struct Failing {
  Model model = perceptron(4);
  std::shared_ptr<std::atomic<bool>> armed = std::make_shared<std::atomic<bool>>(false);

  template <class Fail>
  explicit Failing(const Fail& fail) {
    const auto before = model.stages[2].forward;
    model.stages[2].forward = [before, fail, on = armed](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      if (!*on) return before(args, kwargs);
      return fail(args, before(args, kwargs));
    };
  }
  Pipeline pipeline(std::chrono::milliseconds timeout = std::chrono::seconds(20)) const {
    return Pipeline(model.build(), generate("1F1B", {.ranks = 4, .microbatches = 4}),
                    {.loss = squared_error, .timeout = timeout});
  }
};

TEST(Failure, InAForwardNamesRankStageActionAndMicrobatchAndWhereTheOthersWere) {
  Failing failing([](const Args&, const c10::IValue&) -> c10::IValue { throw std::runtime_error("hot bearings"); });
  Pipeline pipeline = failing.pipeline();
  *failing.armed = true;
  const std::string error = message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); });
  expect_begins(error, "rank 2, stage 2, 2F0 (microbatch 0): hot bearings\n  rank 0: was in ");
  EXPECT_NE(error.find("<-- here"), std::string::npos) << error;
  EXPECT_NE(error.find("2F0"), std::string::npos) << error;
}

TEST(Failure, NamesThePlaceInTheFileOfTheSchedule) {
  Failing failing([](const Args&, const c10::IValue&) -> c10::IValue { throw std::runtime_error("hot bearings"); });
  const std::string rows_of_ranks =
      "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n\n# The third.\n 2F0,2F1,2B0,2B1\n3F0,3B0,3F1,3B1\n";
  Pipeline pipeline(failing.model.build(), parse_csv(rows_of_ranks, {.source = "own.csv"}), {.loss = squared_error});
  *failing.armed = true;
  const std::string error = message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); });
  expect_begins(error, "rank 2, stage 2, 2F0 (microbatch 0), own.csv:5:2: hot bearings\n");
}

TEST(Failure, OfAStepLeavesNothingToTheNext) {
  Failing failing([](const Args&, const c10::IValue&) -> c10::IValue { throw std::runtime_error("hot bearings"); });
  Pipeline pipeline = failing.pipeline();
  const at::Tensor x = rows(8, "x");
  const at::Tensor y = rows(8, "y");
  pipeline.step({x}, {}, y);
  std::vector<at::Tensor> gradients;
  for (const StageModule& stage : failing.model.stages) gradients.push_back(stage.parameters[0].second.grad().clone());

  *failing.armed = true;
  for (int i = 0; i < 20; ++i) EXPECT_THROW(pipeline.step({x}, {}, y), PipelineError);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(same_tensor(gradients[i], failing.model.stages[i].parameters[0].second.grad())) << i;
  }

  *failing.armed = false;
  for (const StageModule& stage : failing.model.stages) {
    for (const auto& [name, parameter] : stage.parameters) parameter.mutable_grad().reset();
  }
  const StepResult again = pipeline.step({x}, {}, y);
  EXPECT_EQ(again.losses.size(), 4U);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_TRUE(same_tensor(gradients[i], failing.model.stages[i].parameters[0].second.grad())) << i;
  }
}

struct ThrowsInBackward : torch::autograd::Function<ThrowsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("no way back");
  }
};

TEST(Failure, WithoutAMessageIsReportedToo) {
  const Model model = perceptron(1);
  PipelineOptions options{.loss = [](const c10::IValue&, const c10::IValue&, const Kwargs&) -> at::Tensor {
    throw std::runtime_error("");
  }};
  Pipeline pipeline(model.build(), generate("GPipe", {.ranks = 1, .microbatches = 2}), options);
  expect_begins(message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); }),
                "rank 0, stage 0, 0F0 (microbatch 0): \n");
}

TEST(Failure, InABackwardIsNamedToo) {
  Failing failing(
      [](const Args&, const c10::IValue& output) -> c10::IValue { return ThrowsInBackward::apply(output.toTensor()); });
  Pipeline pipeline = failing.pipeline();
  *failing.armed = true;
  const std::string error = message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); });
  expect_begins(error, "rank 2, stage 2, 2B0 (microbatch 0): no way back");
}

TEST(Failure, InTheLossIsThatOfTheLastStage) {
  const Model model = perceptron(2);
  Pipeline pipeline(
      model.build(), generate("GPipe", {.ranks = 2, .microbatches = 2}),
      {.loss = [](const c10::IValue& output, const c10::IValue&, const Kwargs&) { return output.toTensor(); }});
  expect_begins(message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); }),
                "rank 1, stage 1, 1F0 (microbatch 0): the loss of microbatch 0: found float32 tensor of shape [2, 8], "
                "expected a tensor of one element.");
}

TEST(Failure, OfAWrongShapeNamesTheStageAndBothShapes) {
  const Model model = perceptron(3);
  std::vector<PipelineStage> stages;
  for (int i = 0; i < 3; ++i) {
    StageOptions options;
    if (i == 1) options.input_metadata = {{TensorMeta({2, 9}, {9, 1}, at::kFloat, test_device(i), false)}};
    options.device = test_device(i);
    stages.emplace_back(model.stages[static_cast<std::size_t>(i)], i, 3, options);
  }
  Pipeline pipeline(std::move(stages), generate("1F1B", {.ranks = 3, .microbatches = 2}), {.loss = squared_error});
  expect_begins(message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); }),
                "rank 1, stage 1, 1F0 (microbatch 0): stage 1, input[0]: its shape is [2, 8], expected [2, 9].");
}

TEST(Failure, OfARankThatSleepsPastTheDeadlineEndsTheOthersInTime) {
  Failing failing([](const Args&, const c10::IValue& output) -> c10::IValue {
    std::this_thread::sleep_for(std::chrono::seconds(3));
    return output;
  });
  Pipeline pipeline = failing.pipeline(std::chrono::seconds(1));
  *failing.armed = true;
  const std::string error = message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); });
  // Rank 1 waits to send, rank 3 for an activation; either may be the first.
  EXPECT_NE(error.find("rank 2 within the deadline of 1.0 s."), std::string::npos) << error;
  EXPECT_NE(error.find("rank 2: was in 2F0 for "), std::string::npos) << error;
  *failing.armed = false;
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
}

TEST(Step, RefusesWhatDoesNotFit) {
  const Model model = perceptron(2);
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}), {.loss = squared_error});
  EXPECT_EQ(message_of<PipelineError>([&] { pipeline.step({rows(3, "x")}, {}, rows(3, "y")); }),
            "the arguments can be split into 3 only, and there are 4 microbatches.\n  Hint: give at least 4 rows, or "
            "take fewer microbatches.");
  EXPECT_EQ(
      message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, rows(6, "y")); }),
      "the target (float32 tensor of shape [6, 8]) has 6 rows, and args[0] (float32 tensor of shape [8, 8]) has 8: "
      "they cannot be split into the same microbatches.\n  Hint: give a target for each row, or say how this one is "
      "split.");
  EXPECT_EQ(
      message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, at::ones({4}, at::kLong)); }),
      "the target (int64 tensor of shape [4]) has 4 rows, and args[0] (float32 tensor of shape [8, 8]) has 8: "
      "they cannot be split into the same microbatches.\n  Hint: give a target for each row, or say how this one is "
      "split.");
  EXPECT_EQ(message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}, {}, at::ones({})); }),
            "the target (float32 tensor of shape []) has no rows, and cannot be split into 4 microbatches.\n  Hint: "
            "give a target for each row.");
  EXPECT_EQ(
      message_of<PipelineError>([&] { pipeline.step({rows(8, "x")}); }),
      "the target is missing: there is a loss function, and the arguments (args[0] is float32 tensor of shape "
      "[8, 8]) come without anything to compare the output with.\n  Hint: step(args, kwargs, target); at::Tensor() "
      "is the target of a loss that takes none.");
  StepOptions options;
  options.weights = {1, 2};
  EXPECT_EQ(message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y"), options); }),
            "there are 2 weights for 4 microbatches.");
  StepOptions kwargs;
  kwargs.stage_kwargs[2] = {};
  EXPECT_EQ(message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y"), kwargs); }),
            "there are keyword arguments for stage 2; expected a stage from 1 to 1.\n  Hint: pass those of stage 0 as "
            "`kwargs`.");
  const c10::AutoGradMode off(false);
  expect_begins(message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); }),
                "step computes gradients, which are disabled on this thread.");
}

TEST(Pipelines, RefuseAScheduleThatDeadlocksWithItsPlacesInTheFile) {
  const Model model = perceptron(2);
  const Schedule stuck = parse_csv("# Rank 0.\n0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", {.source = "own.csv"});
  const std::string error = message_of<ScheduleError>([&] { Pipeline(model.build(), stuck, {.loss = squared_error}); });
  expect_begins(error,
                "own.csv:2:5: rank 0, 0B0: deadlock, the ranks wait for each other in a cycle:\n"
                "  rank 0, own.csv:2:5: 0B0 waits for 1B0 on rank 1\n"
                "  rank 1, own.csv:3:1: 1F1 waits for 0F1 on rank 0\n\n"
                "step  rank 0  rank 1\n0     0F0     1F1\n");
}

TEST(Step, SplitsATargetThatWasFlattened) {
  const Model model = perceptron(2);
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 4}),
                    {.loss = [](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
                      return at::mse_loss(output.toTensor().flatten(), target.toTensor());
                    }});
  EXPECT_EQ(pipeline.step({rows(8, "x")}, {}, rows(8, "y").flatten()).losses.size(), 4U);
  // Uneven microbatches would get elements of other rows.
  expect_begins(message_of<PipelineError>([&] { pipeline.step({rows(9, "x")}, {}, rows(9, "y").flatten()); }),
                "the target (float32 tensor of shape [72]) has 72 rows, and args[0] ");
}

TEST(Step, RefusesATargetWithoutALoss) {
  const Model model = perceptron(2);
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 2}));
  EXPECT_EQ(
      message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); }),
      "there is a target, float32 tensor of shape [4, 8], and no loss function that compares the output with it.\n"
      "  Hint: set PipelineOptions::loss; eval needs neither.");
}

TEST(Step, RefusesToComputeGradientsOfNothing) {
  const Model model = perceptron(2);
  Pipeline pipeline(model.build(), generate("1F1B", {.ranks = 2, .microbatches = 2}));
  EXPECT_EQ(
      message_of<PipelineError>([&] { pipeline.step({rows(4, "x")}); }),
      "the step has computed no gradients: there is no loss function, and no stage has added a loss term.\n  Hint: "
      "give PipelineOptions::loss, or call add_loss in a stage's forward; eval runs forwards alone.");
  for (const StageModule& stage : model.stages) EXPECT_FALSE(stage.parameters[0].second.grad().defined());
  pipeline.eval({rows(4, "x")});
}

TEST(Pipelines, RefuseStagesThatAreNotInOrder) {
  const Model model = perceptron(2);
  const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 2});
  std::vector<PipelineStage> one;
  one.emplace_back(model.stages[0], 0, 1);
  EXPECT_EQ(message_of<PipelineError>([&] { Pipeline(std::move(one), schedule); }),
            "there are 1 stages, and the schedule is for 2.");
  std::vector<PipelineStage> turned;
  turned.emplace_back(model.stages[1], 1, 2);
  turned.emplace_back(model.stages[0], 0, 2);
  EXPECT_EQ(
      message_of<PipelineError>([&] { Pipeline(std::move(turned), schedule); }),
      "element 0 of the list of stages is stage 1 of 2, and the schedule is for 2 stages.\n  Hint: list the stages in "
      "ascending order of stage_index.");
}

}  // namespace
}  // namespace penstock::internal::testing
