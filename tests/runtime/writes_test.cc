// Stages that write in place: into their arguments, their buffers and the batch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/chunk_spec.h"
#include "tests/runtime/models.h"

namespace penstock::internal::testing {
namespace {

constexpr int kStages = 3;
constexpr int kChunks = 4;

// Identity stages, and one that counts its calls in a tensor and returns it.
Model counting(int counting_stage, const std::function<at::Tensor(const Args&, const Kwargs&)>& counter) {
  Model model(kStages);
  for (int i = 0; i < kStages; ++i) {
    model.stages[static_cast<std::size_t>(i)].forward = [=](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      return i == counting_stage ? counter(args, kwargs).add_(1) : tensor(args, 0) + 0;
    };
  }
  return model;
}

c10::IValue replicated_by_name(const char* name) {
  c10::impl::GenericDict spec(c10::StringType::get(), c10::AnyType::get());
  spec.insert(name, Replicate());
  return spec;
}

// The count that each microbatch should return.
at::Tensor counted() {
  return at::arange(1, kChunks + 1, at::kFloat);
}

// With GPipe all forwards of a stage run before the first output is used by a backward.
Schedule gpipe() {
  return generate("GPipe", {.ranks = kStages, .microbatches = kChunks});
}

TEST(Writes, IntoAKeywordArgumentThatIsReturnedAreSeenByLaterMicrobatchesOnly) {
  for (int stage = 0; stage < kStages; ++stage) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const Model model =
        counting(stage, [](const Args&, const Kwargs& kwargs) { return kwargs.at("count").toTensor(); });
    PipelineOptions options;
    options.specs.kwargs = replicated_by_name("count");
    options.specs.stage_kwargs = {{stage, replicated_by_name("count")}};
    if (stage != 0) options.specs.kwargs.reset();
    Pipeline pipeline(model.build(), gpipe(), options);
    for (int i = 0; i < 20; ++i) {
      const Kwargs kwargs{{"count", at::zeros({1})}};
      StepOptions step;
      if (stage > 0) step.stage_kwargs[stage] = kwargs;
      const at::Tensor found =
          pipeline.eval({at::zeros({kChunks})}, stage == 0 ? kwargs : Kwargs{}, {}, step).output.toTensor();
      ASSERT_TRUE(same_tensor(counted(), found)) << found;
    }
  }
}

TEST(Writes, IntoABufferOrAReplicatedArgumentThatIsReturnedAreSeenByLaterMicrobatchesOnly) {
  for (int stage = 0; stage < kStages; ++stage) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    const at::Tensor buffer = at::zeros({1}, test_device(stage));
    Model model = counting(stage, [buffer](const Args&, const Kwargs&) { return buffer; });
    model.stages[static_cast<std::size_t>(stage)].buffers = {{"count", buffer}};
    Pipeline pipeline(model.build(), gpipe());
    const at::Tensor found = pipeline.eval({at::zeros({kChunks})}).output.toTensor();
    EXPECT_TRUE(same_tensor(counted(), found)) << found;
  }
  const Model model = counting(0, [](const Args& args, const Kwargs&) { return tensor(args, 1); });
  PipelineOptions options;
  options.specs.args = c10::ivalue::Tuple::create({TensorChunkSpec(0), Replicate()});
  Pipeline pipeline(model.build(), gpipe(), options);
  const at::Tensor found = pipeline.eval({at::zeros({kChunks}), at::zeros({1})}).output.toTensor();
  EXPECT_TRUE(same_tensor(counted(), found)) << found;
}

TEST(Writes, IntoATermOfTheLossAreSeenByLaterMicrobatchesOnly) {
  const at::Tensor buffer = at::zeros({}, test_device(0));
  Model model(1);
  model.stages[0] = {.forward = [buffer](const Args& args, const Kwargs&) -> c10::IValue {
                       add_loss(buffer.add_(1));
                       return tensor(args, 0);
                     },
                     .buffers = {{"count", buffer}}};
  Pipeline pipeline(model.build(), generate("GPipe", {.ranks = 1, .microbatches = kChunks}));
  const StepResult result = pipeline.eval({at::zeros({kChunks})});
  for (std::size_t i = 0; i < kChunks; ++i) {
    EXPECT_EQ(result.loss_terms[i].at(0).item<double>(), static_cast<double>(i) + 1);
  }
}

// Every stage writes into its argument, the first into the batch, and saves the result for its backward.
Model writing(int stages) {
  Model model = perceptron(stages);
  for (StageModule& stage : model.stages) {
    stage.forward = [before = stage.forward](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      return before({tensor(args, 0).mul_(1.5)}, kwargs);
    };
  }
  return model;
}

class EveryScheduleOfWrites : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Threads, EveryScheduleOfWrites, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const Generator& generator : generators()) {
                             if (generator.name != "ForwardOnly") names.emplace_back(generator.name);
                           }
                           return names;
                         }()));

TEST_P(EveryScheduleOfWrites, IntoTheBatchAreSeenByNobodyElse) {
  const Schedule schedule = generate(GetParam(), {.ranks = 2, .microbatches = kChunks});
  const Model model = writing(schedule.stages());
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  for (const bool needs_gradient : {false, true}) {
    SCOPED_TRACE(needs_gradient);
    const at::Tensor x = rows(9, "x").clone().requires_grad_(needs_gradient);
    const at::Tensor y = rows(9, "y");
    std::vector<PlainMicrobatch> expected;
    std::vector<at::Tensor> gradients_of_x;
    const Model again = writing(schedule.stages());
    const SplitArgs split = split_args_kwargs_into_chunks({rows(9, "x"), y}, {}, kChunks);
    for (int i = 0; i < kChunks; ++i) {
      const Args& own = split.args[static_cast<std::size_t>(i)];
      const at::Tensor target = own[1].toTensor();
      expected.push_back(plain_microbatch(again, {own[0].toTensor().clone()}, target, i, 1.0 / kChunks, {}));
      const at::Tensor leaf = own[0].toTensor().clone().requires_grad_();
      at::Tensor value = leaf;
      for (std::size_t stage = 0; stage < again.stages.size(); ++stage) value = forward_of(again, stage, value.clone());
      at::mse_loss(value.cpu(), target).backward(at::scalar_tensor(1.0 / kChunks));
      gradients_of_x.push_back(leaf.grad());
    }
    zero_grad(model);
    const StepResult result = pipeline.step({x}, {}, y);
    EXPECT_TRUE(same_tensor(x, rows(9, "x")));
    EXPECT_TRUE(same_tensor(outputs_of(expected), result.output.toTensor()));
    const auto sums = added_up(pipeline.schedule(), expected);
    for (std::size_t stage = 0; stage < model.stages.size(); ++stage) {
      for (std::size_t i = 0; i < model.stages[stage].parameters.size(); ++i) {
        const at::Tensor found = model.stages[stage].parameters[i].second.grad();
        EXPECT_TRUE(same_tensor(sums[stage][i], found)) << stage << " " << i;
      }
    }
    EXPECT_TRUE(same_tensor(needs_gradient ? at::cat(gradients_of_x) : at::Tensor(), x.grad())) << x.grad();
  }
}

// A write copies a chunk, not the batch of which it is a part.
TEST(Writes, IntoAChunkCopyThatChunkAlone) {
  PENSTOCK_ON_CPU_ALONE("on a device, each chunk is a copy");
  Model model(1);
  std::vector<std::size_t> sizes;
  model.stages[0].forward = [&sizes](const Args& args, const Kwargs&) -> c10::IValue {
    at::Tensor x = tensor(args, 0);
    x.add_(1);
    sizes.push_back(x.storage().nbytes());
    return x;
  };
  Pipeline pipeline(model.build(), generate("GPipe", {.ranks = 1, .microbatches = kChunks}));
  const at::Tensor x = at::arange(2 * kChunks, at::kFloat).view({2, kChunks}).t();
  EXPECT_TRUE(same_tensor(pipeline.eval({x}).output.toTensor(), x + 1));
  // The copy reaches from the first to the last element of a row, which are not adjacent.
  for (const std::size_t size : sizes) EXPECT_EQ(size, (kChunks + 1) * sizeof(float));
}

}  // namespace
}  // namespace penstock::internal::testing
