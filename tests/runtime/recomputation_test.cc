// Recomputed stages and checkpointed parts of stages give the losses, outputs and gradients of one process, bitwise.
#include "penstock/stage/recomputation.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/stage/modules.h"
#include "tests/runtime/recomputed_models.h"
#include "tests/stage/recomputed_part.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

// Places an R directly after every forward that is not part of a pair, also where the backward follows.
Schedule recomputed_early(const Schedule& schedule) {
  Schedule result = schedule.without_actions();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      result.add(rank, action);
      if (is_forward(action)) result.add(rank, recomputation(action.stage, action.microbatch));
    }
  }
  return result;
}

template <std::size_t index>
Model checkpointed_model(int stages, const StageDevices& devices) {
  return checkpointed(kModels[index].make_on(stages, devices));
}

INSTANTIATE_TEST_SUITE_P(Threads, EveryRecomputedSchedule, ::testing::ValuesIn(recomputed_cases()), name_of_case);

TEST_P(EveryRecomputedSchedule, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  const Schedule plain_schedule = schedule();
  if (!features_of(plain_schedule).backward) return;
  for (const Schedule& recomputed : {add_recomputation(plain_schedule), recomputed_early(plain_schedule)}) {
    for (const NamedModel& named : kModels) {
      const CountedParts counted;
      expect_what_one_process_gives(named, recomputed);
      EXPECT_EQ(counted.made(), count_recomputations(recomputed));
      EXPECT_EQ(counted.recomputed(), count_recomputations(recomputed));
      if (HasFailure()) return;
    }
  }
}

TEST_P(EveryRecomputedSchedule, GivesThemWithCheckpointedParts) {
  const Schedule made = schedule();
  if (!features_of(made).backward) return;
  const NamedModel models[] = {{"perceptron", checkpointed_model<0>},      {"transformer", checkpointed_model<1>},
                               {"several_tensors", checkpointed_model<2>}, {"with_skips", checkpointed_model<3>},
                               {"shared_inside", checkpointed_model<4>},   {"shared_across", checkpointed_model<5>}};
  for (const NamedModel& named : models) {
    const CountedParts counted;
    expect_what_one_process_gives(named, made);
    // Half of the parts are those of the reference.
    EXPECT_EQ(counted.made(), 2 * made.stages() * made.microbatches());
    EXPECT_EQ(counted.recomputed(), counted.made());
    if (HasFailure()) return;
  }
}

TEST(Recomputation, WorksWithReplicasAndShards) {
  const Schedule made = generate("ZBVZeroBubble", {.ranks = 2, .microbatches = 4});
  const at::Tensor x = input_for(kModels[1], 8, "x").narrow(0, 0, 16);
  const at::Tensor y = input_for(kModels[1], 8, "y").narrow(0, 0, 16);
  for (const bool sharded : {false, true}) {
    const auto gradients = [&](const Schedule& schedule, Model (*changed)(Model)) {
      std::vector<StagedModel> replicas;
      for (int i = 0; i < 2; ++i) replicas.push_back(changed(transformer(made.stages())).build());
      Pipeline pipeline(std::move(replicas), schedule, {.loss = squared_error, .sharded = sharded});
      std::vector<at::Tensor> found;
      for (int step = 0; step < 2; ++step) found.push_back(at::stack(pipeline.step({x}, {}, y).losses));
      for (int replica = 0; replica < 2; ++replica) {
        for (const PipelineStage& stage : pipeline.stages(replica)) {
          for (const auto& [name, parameter] : stage.parameters()) found.push_back(parameter.grad().clone());
        }
      }
      return found;
    };
    const std::vector<at::Tensor> expected = gradients(made, unchanged);
    const int in_all_steps = 2 * 2 * made.stages() * made.microbatches();
    const CountedParts stages;
    expect_equal(expected, gradients(add_recomputation(made), unchanged));
    EXPECT_GT(stages.made(), 0);
    EXPECT_EQ(stages.recomputed(), stages.made());
    // These are computed again within I, W or B.
    const CountedParts parts;
    expect_equal(expected, gradients(made, checkpointed));
    EXPECT_EQ(parts.made(), in_all_steps);
    EXPECT_EQ(parts.recomputed(), in_all_steps);
  }
}

TEST(Recomputation, IsAnOptionOfAStage) {
  for (const char* name : {"GPipe", "ZBVZeroBubble"}) {
    SCOPED_TRACE(name);
    const Schedule made = generate(name, {.ranks = 2, .microbatches = 4});
    const auto gradients = [&](const Schedule& schedule, bool recompute) {
      const Model model = transformer(schedule.stages());
      std::vector<PipelineStage> stages;
      for (int i = 0; i < schedule.stages(); ++i) {
        stages.emplace_back(model.stages[static_cast<std::size_t>(i)], i, schedule.stages(),
                            StageOptions{.device = test_device(i), .recompute = recompute});
      }
      Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error});
      pipeline.step({input_for(kModels[1], 4, "x")}, {}, input_for(kModels[1], 4, "y"));
      return gradients_of(model);
    };
    const std::vector<at::Tensor> expected = gradients(made, false);
    // An R of the schedule computes the same earlier.
    for (const Schedule& schedule : {made, add_recomputation(made, {1})}) {
      const CountedParts counted;
      expect_equal(expected, gradients(schedule, true));
      EXPECT_EQ(counted.made(), made.stages() * made.microbatches());
      EXPECT_EQ(counted.recomputed(), counted.made());
    }
  }
}

TEST(Recomputation, RefusesAStageWithADwBuilder) {
  PipelineStage stage(
      perceptron(1).stages[0], 0, 1,
      {.device = test_device(0), .dw_builder = [] { return std::function<void()>([] {}); }, .recompute = true});
  stage.begin(Wiring(1), 1, PipelineStage::Mode::Autograd);
  EXPECT_EQ(message_of<StageError>([&] { stage.forward(0, {}, {rows(2, "x").to(test_device(0))}, {}); }),
            "stage 0 has a dw_builder, and cannot be recomputed.\n"
            "  Hint: leave out its R in the schedule, or StageOptions::recompute.");
}

TEST(Recomputation, GivesGradientsOfArgumentsAndKeywordArguments) {
  const auto gradients = [](const char* csv) {
    Model model(2);
    const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
    model.stages[0] = {.forward = [w](const Args& args, const Kwargs& kwargs) -> c10::IValue {
                         return at::tanh(at::matmul(tensor(args, 0), w)) *
                                kwargs.at("scales").toTupleRef().elements()[0].toTensor();
                       },
                       .parameters = {{"w", w}}};
    model.stages[1].forward = [](const Args& args, const Kwargs&) -> c10::IValue { return at::sin(tensor(args, 0)); };
    Pipeline pipeline(model.build(), parse_csv(csv), {.loss = squared_error});
    const at::Tensor x = rows(4, "x").requires_grad_();
    const at::Tensor scales = rows(4, "scales").requires_grad_();
    pipeline.step({x}, {{"scales", c10::ivalue::Tuple::create({scales})}}, rows(4, "y"));
    return std::vector<at::Tensor>{x.grad(), scales.grad(), w.grad()};
  };
  const std::vector<at::Tensor> plain_gradients = gradients("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  for (const at::Tensor& gradient : plain_gradients) EXPECT_TRUE(gradient.defined());
  expect_equal(plain_gradients, gradients("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1B1\n"));
}

TEST(Recomputation, DropsTheSavedActivations) {
  // The storage of what a forward saved ends with the forward.
  Model model(1);
  const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> saved;
  model.stages[0] = {.forward = [&saved, w](const Args& args, const Kwargs&) -> c10::IValue {
                       const at::Tensor hidden = at::exp(at::matmul(tensor(args, 0), w));
                       saved.emplace_back(hidden.storage().getWeakStorageImpl());
                       return at::matmul(hidden, w);
                     },
                     .parameters = {{"w", w}}};
  std::map<std::string, int> alive;
  PipelineOptions options{.loss = squared_error};
  options.functions.after = [&](int, const Action& action) {
    int count = 0;
    for (const auto& storage : saved) count += storage.expired() ? 0 : 1;
    alive[to_string(action)] = count;
  };
  Pipeline pipeline(model.build(), parse_csv("0F0,0F1,0R0,0I0,0W0,0R1,0B1\n"), options);
  pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
  EXPECT_EQ(alive["0F0"], 0);
  EXPECT_EQ(alive["0F1"], 0);
  EXPECT_EQ(alive["0R0"], 1);
  EXPECT_EQ(alive["0W0"], 0);
  EXPECT_EQ(alive["0R1"], 1);
  EXPECT_EQ(alive["0B1"], 0);
}

TEST(Recomputation, CheckpointsEveryNthModuleOfASequential) {
  const auto gradients = [](int every, std::int64_t& recomputed) {
    at::manual_seed(3);
    torch::nn::Sequential sequential(torch::nn::Linear(kWide, kWide), torch::nn::Dropout(0.5), torch::nn::Tanh(),
                                     torch::nn::Linear(kWide, kWide));
    sequential->to(test_device(0));
    std::vector<PipelineStage> stages;
    stages.emplace_back(stage_module(sequential, {.checkpoint_every = every}), 0, 1,
                        StageOptions{.device = test_device(0)});
    const CountedParts counted;
    Pipeline pipeline(std::move(stages), generate("GPipe", {.ranks = 1, .microbatches = 2}), {.loss = squared_error});
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    recomputed = counted.recomputed();
    std::vector<at::Tensor> found;
    for (const at::Tensor& parameter : sequential->parameters()) found.push_back(parameter.grad());
    return found;
  };
  std::int64_t none = 0;
  const std::vector<at::Tensor> expected = gradients(0, none);
  EXPECT_EQ(none, 0);
  for (const int every : {1, 2, 3}) {
    std::int64_t recomputed = 0;
    expect_equal(expected, gradients(every, recomputed));
    EXPECT_EQ(recomputed, 2 * (4 / every)) << every;
  }
  EXPECT_THROW(stage_module(torch::nn::Sequential(torch::nn::Tanh()), {.checkpoint_every = -1}), StageError);
}

TEST(Recomputation, WorksWithTorchScript) {
  const auto gradients = [](const char* csv) {
    torch::jit::Module module("scaled");
    module.register_parameter("w", weight("w", {kWide, kWide}, test_device(0)), /*is_buffer=*/false);
    module.define(
        "def forward(self, x):\n  y = torch.matmul(x, self.w)\n  return torch.tanh(y) * y + torch.sigmoid(y)\n");
    std::vector<PipelineStage> stages;
    stages.emplace_back(stage_module(module), 0, 1, StageOptions{.device = test_device(0)});
    Pipeline pipeline(std::move(stages), parse_csv(csv), {.loss = squared_error});
    for (int step = 0; step < 4; ++step) pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    return std::vector<at::Tensor>{module.attr("w").toTensor().grad()};
  };
  const at::Tensor expected = gradients("0F0,0F1,0B0,0B1\n")[0];
  const at::Tensor found = gradients("0F0,0F1,0R0,0B0,0R1,0B1\n")[0];
  // The optimizer of TorchScript rounds in another way.
  EXPECT_TRUE(at::allclose(expected, found, 1e-5, 1e-7));
}

TEST(Recomputation, LeavesBackwardsOfTheUserAlone) {
  Model model = perceptron(1);
  PipelineOptions options{.loss = squared_error, .backward_requires_autograd = false};
  int backwards = 0;
  options.functions.overrides[Computation::FullBackward] = [&](const Action&, ActionContext&) { ++backwards; };
  Pipeline pipeline(model.build(), parse_csv("0F0,0F1,0R0,0B0,0R1,0B1\n"), options);
  pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
  EXPECT_EQ(backwards, 2);
}

TEST(Recomputation, CannotFollowItsStep) {
  at::Tensor aside;
  Model model(1);
  const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
  model.stages[0] = {.forward = [&](const Args& args, const Kwargs&) -> c10::IValue {
                       const at::Tensor y = at::exp(at::matmul(tensor(args, 0), w));
                       aside = y;
                       return y;
                     },
                     .parameters = {{"w", w}}};
  PipelineOptions options{.loss = squared_error};
  // Nothing asks for the activations before the step ends.
  for (const Computation computation : {Computation::Recompute, Computation::FullBackward}) {
    options.functions.overrides[computation] = [](const Action&, ActionContext&) {};
  }
  {
    Pipeline pipeline(model.build(), parse_csv("0F0,0R0,0B0\n"), options);
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
  }
  EXPECT_EQ(message_of<StageError>([&] { aside.sum().backward(); }),
            "a part of a forward cannot be computed again after its step.");
}

TEST(Recomputation, AddsLossTermsOnce) {
  const auto losses = [](const char* csv) {
    Model model = perceptron(1);
    model.stages[0].forward = [forward = model.stages[0].forward](const Args& args, const Kwargs& kwargs) {
      const c10::IValue output = forward(args, kwargs);
      add_loss(output.toTensor().square().mean());
      return output;
    };
    Pipeline pipeline(model.build(), parse_csv(csv), {.loss = squared_error});
    std::vector<at::Tensor> found = pipeline.step({rows(4, "x")}, {}, rows(4, "y")).losses;
    for (const at::Tensor& gradient : gradients_of(model)) found.push_back(gradient);
    return found;
  };
  expect_equal(losses("0F0,0F1,0B0,0B1\n"), losses("0F0,0F1,0R0,0B0,0R1,0B1\n"));
}

TEST(Recomputation, LeavesNothingBehindWhenItFails) {
  Model model = perceptron(2);
  int calls = 0;
  model.stages[0].forward = [&calls, forward = model.stages[0].forward](const Args& args, const Kwargs& kwargs) {
    if (++calls == 3) throw std::runtime_error("the bearings are hot");
    return forward(args, kwargs);
  };
  Pipeline pipeline(model.build(), parse_csv("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n"), {.loss = squared_error});
  const auto step = [&] { return pipeline.step({rows(4, "x")}, {}, rows(4, "y")); };
  const std::string error = message_of(step);
  EXPECT_EQ(error.substr(0, error.find('\n')),
            "rank 0, stage 0, 0R0 (microbatch 0), schedule.csv:1:9: the bearings are hot");
  for (const at::Tensor& gradient : gradients_of(model)) EXPECT_FALSE(gradient.defined());
  EXPECT_EQ(step().losses.size(), 2U);
}

TEST(Recomputation, RefusesAStageThatWritesIntoItsArguments) {
  Model model(1);
  model.stages[0].forward = [](const Args& args, const Kwargs&) -> c10::IValue {
    at::Tensor x = tensor(args, 0);
    return x.mul_(2);
  };
  Pipeline pipeline(model.build(), parse_csv("0F0,0R0,0B0\n"), {.loss = squared_error});
  const std::string error = message_of([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); });
  EXPECT_NE(error.find("input 0 of a part of a forward that is recomputed was written to by its forward.\n  Hint: let "
                       "the part write into a clone of it."),
            std::string::npos)
      << error;
}

TEST(Recomputation, RefusesAStageThatDependsOnMoreThanItsInputs) {
  for (const bool another_shape : {false, true}) {
    Model model = perceptron(1);
    int calls = 0;
    model.stages[0].forward = [&, forward = model.stages[0].forward](const Args& args, const Kwargs& kwargs) {
      at::Tensor y = forward(args, kwargs).toTensor();
      if (++calls == 1) return c10::IValue(at::exp(y));
      return c10::IValue(another_shape ? at::exp(y.narrow(0, 0, 1)) : y);
    };
    Pipeline pipeline(model.build(), parse_csv("0F0,0R0,0B0\n"), {.loss = squared_error});
    const std::string error = message_of([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); });
    const std::string expected =
        another_shape
            ? "a part of a forward saved Float[4, 8] as its tensor 2, and Float[1, 8] when it was computed again"
            : "a part of a forward saved 3 tensors, and 2 when it was computed again";
    EXPECT_NE(error.find(expected + ".\n  Hint: its result should depend on its inputs alone."), std::string::npos)
        << error;
  }
}

TEST(Recomputation, IsNotDoneInEvaluation) {
  const CountedParts counted;
  Model model = checkpointed(perceptron(2));
  Pipeline pipeline(model.build(), generate("GPipe", {.ranks = 2, .microbatches = 2}), {.loss = squared_error});
  pipeline.eval({rows(4, "x")}, {}, rows(4, "y"));
  EXPECT_EQ(counted.made(), 0);
}

TEST(Recomputation, CannotPrecedeItsForward) {
  PipelineStage stage(perceptron(1).stages[0], 0, 1, StageOptions{.device = test_device(0)});
  stage.begin(Wiring(1), 1, PipelineStage::Mode::Autograd);
  EXPECT_EQ(message_of<StageError>([&] { stage.recompute(0); }),
            "stage 0, microbatch 0: its recomputation comes before its forward.");
  EXPECT_EQ(message_of<StageError>([&] { stage.full_backward(0, {}); }),
            "stage 0, microbatch 0: its backward comes before its forward.");
}

}  // namespace
}  // namespace penstock::internal::testing
