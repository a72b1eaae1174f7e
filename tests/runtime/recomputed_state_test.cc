// Recomputed forwards put back what they write: buffers, state, and parameters that a forward writes to.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/schedule/csv.h"
#include "tests/runtime/recomputed_models.h"
#include "tests/stage/recomputed_part.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

class EveryRecomputedScheduleOfBuffers : public EveryRecomputedSchedule {};
INSTANTIATE_TEST_SUITE_P(Threads, EveryRecomputedScheduleOfBuffers, ::testing::ValuesIn(recomputed_cases()),
                         name_of_case);

// Batch normalisation in training mode: its running statistics are buffers that each forward updates.
Model normalised(int count) {
  Model model(count);
  for (int i = 0; i < count; ++i) {
    const at::Tensor w = weight(numbered("norm", i), {kWide, kWide}, test_device(i));
    const at::Tensor mean = at::zeros({kWide}, test_device(i));
    const at::Tensor variance = at::ones({kWide}, test_device(i));
    const at::Tensor batches = at::zeros({}, at::TensorOptions(test_device(i)).dtype(at::kLong));
    StageModule& stage = model.stages[static_cast<std::size_t>(i)];
    stage.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
      batches.add_(1);
      // The momentum, and with it what the statistics become, depends on a buffer.
      const at::Tensor y = at::batch_norm(at::matmul(tensor(args, 0), w), {}, {}, mean, variance, /*training=*/true,
                                          1.0 / batches.item<double>(), 1e-5, /*cudnn_enabled=*/false);
      // So does the output.
      return at::relu(y) * (1 + batches.to(at::kFloat));
    };
    stage.parameters = {{"w", w}};
    stage.buffers = {{"mean", mean}, {"variance", variance}, {"batches", batches}};
  }
  return model;
}

std::vector<at::Tensor> buffers_of(const Model& model) {
  std::vector<at::Tensor> all;
  for (const StageModule& stage : model.stages) {
    for (const auto& [name, buffer] : stage.buffers) all.push_back(buffer);
  }
  return all;
}

TEST_P(EveryRecomputedScheduleOfBuffers, AreUpdatedOnce) {
  const Schedule made = schedule();
  if (!features_of(made).backward) return;
  const at::Tensor x = rows(4 * made.microbatches(), "x");
  const at::Tensor y = rows(4 * made.microbatches(), "y");
  // Losses and outputs of two steps, then the gradients and buffers.
  const auto train = [&](const Model& model, const Schedule& schedule) {
    Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
    StepOptions everywhere;
    everywhere.results_everywhere = true;
    std::vector<at::Tensor> found;
    for (int step = 0; step < 2; ++step) {
      const StepResult result = pipeline.step({x}, {}, y, everywhere);
      found.push_back(result.output.toTensor());
      found.insert(found.end(), result.losses.begin(), result.losses.end());
    }
    for (const at::Tensor& gradient : gradients_of(model)) found.push_back(gradient);
    for (const at::Tensor& buffer : buffers_of(model)) found.push_back(buffer);
    return found;
  };
  const std::vector<at::Tensor> expected = train(normalised(made.stages()), made);
  const int parts = 2 * made.stages() * made.microbatches();
  {
    const Schedule recomputed = add_recomputation(made);
    const CountedParts counted;
    expect_equal(expected, train(normalised(made.stages()), recomputed));
    EXPECT_EQ(counted.made(), 2 * count_recomputations(recomputed));
    EXPECT_EQ(counted.recomputed(), counted.made());
  }
  const CountedParts counted;
  expect_equal(expected, train(checkpointed(normalised(made.stages())), made));
  EXPECT_EQ(counted.made(), parts);
  EXPECT_EQ(counted.recomputed(), parts);
}

TEST(RecomputedState, KeepsABufferThatTheBackwardNeedsAsItWasInTheForward) {
  // The backward of the product needs the count of its own microbatch.
  const at::Tensor x = rows(4, "x");
  const at::Tensor y = rows(4, "y");
  const auto gradients = [&](const char* csv, Model (*changed)(Model), bool copies) {
    Model model(1);
    const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
    const at::Tensor count = at::zeros({}, test_device(0));
    model.stages[0] = {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
                         count.add_(1);
                         return at::matmul(tensor(args, 0), w) * (copies ? count.clone() : count);
                       },
                       .parameters = {{"w", w}},
                       .buffers = {{"count", count}}};
    model = changed(model);
    Pipeline pipeline(model.build(), parse_csv(csv), {.loss = squared_error});
    pipeline.step({x}, {}, y);
    return std::vector<at::Tensor>{w.grad(), count};
  };
  const std::vector<at::Tensor> expected = gradients("0F0,0F1,0B0,0B1\n", unchanged, /*copies=*/true);
  expect_equal(expected, gradients("0F0,0F1,0R0,0B0,0R1,0B1\n", unchanged, /*copies=*/false));
  expect_equal(expected, gradients("0F0,0F1,0B0,0B1\n", checkpointed, /*copies=*/false));
}

TEST(RecomputedState, UpdatesASparseBufferOnce) {
  PENSTOCK_ON_CPU_ALONE("the simulated device has no sparse tensors");
  const auto counted_rows = [](const char* csv) {
    Model model(1);
    const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
    at::Tensor seen = at::zeros({kWide}).to_sparse();
    const at::Tensor one = at::ones({kWide}).to_sparse();
    model.stages[0] = {.forward = [=](const Args& args, const Kwargs&) mutable -> c10::IValue {
                         seen.add_(one);
                         return at::tanh(at::matmul(tensor(args, 0), w)) * seen.to_dense().sum();
                       },
                       .parameters = {{"w", w}},
                       .buffers = {{"seen", seen}}};
    Pipeline pipeline(model.build(), parse_csv(csv), {.loss = squared_error});
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    return std::vector<at::Tensor>{w.grad(), seen.to_dense()};
  };
  expect_equal(counted_rows("0F0,0F1,0B0,0B1\n"), counted_rows("0F0,0F1,0R0,0B0,0R1,0B1\n"));
}

TEST(RecomputedState, WritesIntoAParameterOnce) {
  // A stage names the parameters that its forward writes to in `state` too.
  const auto train = [](const char* csv, Model (*changed)(Model)) {
    Model model(1);
    const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
    const at::Tensor fading = at::ones({kWide}, test_device(0));
    model.stages[0] = {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
                         const at::NoGradGuard no_grad;
                         fading.mul_(0.9);
                         const c10::AutoGradMode grad(true);
                         return at::tanh(at::matmul(tensor(args, 0), w)) * fading.clone();
                       },
                       .parameters = {{"w", w}, {"fading", fading}},
                       .state = {{"fading", fading}}};
    model = changed(model);
    Pipeline pipeline(model.build(), parse_csv(csv), {.loss = squared_error});
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    return std::vector<at::Tensor>{w.grad(), fading};
  };
  const std::vector<at::Tensor> expected = train("0F0,0F1,0B0,0B1\n", unchanged);
  expect_equal(expected, train("0F0,0F1,0R0,0B0,0R1,0B1\n", unchanged));
  expect_equal(expected, train("0F0,0F1,0B0,0B1\n", checkpointed));
}

// Its values when it was used are saved, as the next forward changes it.
TEST(RecomputedState, WritesOnceIntoAParameterWithAGradient) {
  const auto train = [](const char* csv) {
    Model model(1);
    const at::Tensor w = weight("w", {kWide, kWide}, test_device(0));
    model.stages[0] = {.forward = [=](const Args& args, const Kwargs&) -> c10::IValue {
                         {
                           const at::NoGradGuard no_grad;
                           w.mul_(0.9);
                         }
                         return at::tanh(at::matmul(tensor(args, 0), w));
                       },
                       .parameters = {{"w", w}},
                       .state = {{"w", w}}};
    Pipeline pipeline(model.build(), parse_csv(csv), {.loss = squared_error});
    pipeline.step({rows(4, "x")}, {}, rows(4, "y"));
    return std::vector<at::Tensor>{w.grad(), w.detach()};
  };
  expect_equal(train("0F0,0B0\n"), train("0F0,0R0,0B0\n"));
}

TEST(RecomputedState, NamesAParameterThatWasModifiedMeanwhile) {
  // Autograd saves what was computed from the parameter, and not the parameter itself.
  for (const bool parts : {false, true}) {
    Model model(1);
    const at::Tensor w = weight("w", {kWide}, test_device(0));
    model.stages[0] = {
        .forward = [=](const Args& args, const Kwargs&) -> c10::IValue { return tensor(args, 0) * w.exp(); },
        .parameters = {{"w", w}}};
    if (parts) model = checkpointed(model);
    PipelineOptions options{.loss = squared_error};
    options.functions.after = [&](int, const Action& action) {
      if (action.computation != Computation::FullBackward) return;
      const at::NoGradGuard no_grad;
      w.add_(1);
    };
    Pipeline pipeline(model.build(), parse_csv(parts ? "0F0,0F1,0B0,0B1\n" : "0F0,0F1,0R0,0B0,0R1,0B1\n"), options);
    const std::string error = message_of([&] { pipeline.step({rows(4, "x")}, {}, rows(4, "y")); });
    EXPECT_NE(error.find("parameter 'w' was modified between a forward and its recomputation.\n  Hint: step the "
                         "optimizer after the backwards; if the forward itself writes to it, add it to "
                         "StageModule::state."),
              std::string::npos)
        << error;
  }
}

TEST(RecomputedState, LeavesNothingBehindWhenAPartFailsInItsBackward) {
  Model model = normalised(1);
  bool fails = true;
  int calls = 0;
  model.stages[0].forward = [&, forward = model.stages[0].forward](const Args& args, const Kwargs& kwargs) {
    const c10::IValue result = forward(args, kwargs);
    // The second part that is computed again.
    if (++calls == 4 && fails) throw std::runtime_error("the bearings are hot");
    return result;
  };
  model = checkpointed(model);
  const std::vector<at::Tensor> before = clones(buffers_of(model));
  Pipeline pipeline(model.build(), parse_csv("0F0,0F1,0B0,0B1\n"), {.loss = squared_error});
  const auto step = [&] { return pipeline.step({rows(4, "x")}, {}, rows(4, "y")); };
  const std::string error = message_of(step);
  EXPECT_EQ(error.substr(0, error.find('\n')),
            "rank 0, stage 0, 0B1 (microbatch 1), schedule.csv:1:13: the bearings are hot");
  for (const at::Tensor& gradient : gradients_of(model)) EXPECT_FALSE(gradient.defined());
  expect_equal(before, buffers_of(model));
  fails = false;
  EXPECT_EQ(step().losses.size(), 2U);
}

}  // namespace
}  // namespace penstock::internal::testing
