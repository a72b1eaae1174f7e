// A failed step is rolled back: gradients, buffers and random numbers are as before it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

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

// A loss that throws at its n-th call from now, counted from 0. It never throws while n is negative.
struct FailingLoss {
  std::shared_ptr<std::atomic<int>> calls_left = std::make_shared<std::atomic<int>>(-1);

  LossFunction function() const {
    return [left = calls_left](const c10::IValue& output, const c10::IValue& target, const Kwargs& kwargs) {
      if (*left >= 0 && (*left)-- == 0) throw std::runtime_error("no loss");
      return squared_error(output, target, kwargs);
    };
  }
  void fail_at(int call) const { *calls_left = call; }
};

// The last of several microbatches fails, so that backwards have run.
constexpr int kMicrobatches = 4;
constexpr int kLate = 3;

Schedule schedule_of(int ranks) {
  return generate("1F1B", {.ranks = ranks, .microbatches = kMicrobatches});
}

struct Gradient {
  at::Tensor tensor;
  at::Tensor values;
};
std::vector<Gradient> visible_gradients(const Pipeline& pipeline) {
  std::vector<Gradient> gradients;
  for (int replica = 0; replica < pipeline.replicas(); ++replica) {
    for (const PipelineStage& stage : pipeline.stages(replica)) {
      for (const auto& [name, parameter] : stage.parameters()) {
        gradients.push_back({parameter.grad(), parameter.grad().defined() ? parameter.grad().clone() : at::Tensor()});
      }
    }
  }
  return gradients;
}
void expect_the_same(const std::vector<Gradient>& before, const std::vector<Gradient>& after) {
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(before[i].tensor.is_same(after[i].tensor)) << i;
    EXPECT_TRUE(same_tensor(before[i].values, after[i].values)) << i;
  }
}

TEST(Rollback, RestoresGradientsInTheSameViewsOfAFlatBuffer) {
  const Model model = perceptron(2);
  const FailingLoss loss;
  Pipeline pipeline(model.build(), schedule_of(2), {.loss = loss.function()});
  // Each stage has its half on its device.
  std::vector<at::Tensor> halves;
  for (int i = 0; i < 2; ++i) {
    const at::Tensor& half = halves.emplace_back(at::zeros({kWide * kWide + kWide}, test_device(i)));
    std::int64_t next = 0;
    for (const auto& [name, parameter] : model.stages[static_cast<std::size_t>(i)].parameters) {
      parameter.mutable_grad() = half.narrow(0, next, parameter.numel()).view(parameter.sizes());
      next += parameter.numel();
    }
  }
  const auto flat = [&] { return at::cat({halves[0].cpu(), halves[1].cpu()}); };
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const at::Tensor before = flat();
  EXPECT_GT(before.abs().sum().item<double>(), 0);
  const auto gradients = visible_gradients(pipeline);
  for (const int call : {0, kLate}) {
    loss.fail_at(call);
    EXPECT_THROW(pipeline.step({rows(8, "x")}, {}, rows(8, "y")), PipelineError);
    EXPECT_TRUE(same_tensor(before, flat()));
    expect_the_same(gradients, visible_gradients(pipeline));
  }
  // Later steps still add to the same views.
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  EXPECT_FALSE(same_tensor(before, flat()));
}

TEST(Rollback, RestoresGradientsOfReplicasShardsAndSharedParameters) {
  for (const bool sharded : {false, true}) {
    SCOPED_TRACE(sharded ? "sharded" : "replicated");
    std::vector<StagedModel> replicas;
    for (int i = 0; i < 2; ++i) replicas.push_back(shared_across(2).build());
    const FailingLoss loss;
    Pipeline pipeline(std::move(replicas), schedule_of(2), {.loss = loss.function(), .sharded = sharded});
    const auto fail = [&] {
      const auto before = visible_gradients(pipeline);
      for (const bool reduce : {true, false}) {
        loss.fail_at(2 * kLate);
        StepOptions options;
        options.reduce = reduce;
        EXPECT_THROW(pipeline.step({rows(16, "x")}, {}, rows(16, "y"), options), PipelineError);
        expect_the_same(before, visible_gradients(pipeline));
      }
    };
    fail();
    StepOptions without;
    without.reduce = false;
    pipeline.step({rows(16, "x")}, {}, rows(16, "y"), without);
    fail();
    pipeline.step({rows(16, "x")}, {}, rows(16, "y"));
    fail();
    pipeline.step({rows(16, "x")}, {}, rows(16, "y"), without);
    fail();
  }
}

TEST(Rollback, RestoresASparseGradient) {
  PENSTOCK_ON_CPU_ALONE("the simulated device has no sparse tensors");
  const at::Tensor table = weight("table", {8, kWide});
  Model model(1);
  model.stages[0] = {.forward = [table](const Args& args, const Kwargs&) -> c10::IValue {
                       return at::embedding(table, tensor(args, 0), /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                                            /*sparse=*/true);
                     },
                     .parameters = {{"table", table}}};
  const FailingLoss loss;
  Pipeline pipeline(model.build(), schedule_of(1), {.loss = loss.function()});
  const at::Tensor ids = at::arange(8);
  pipeline.step({ids}, {}, rows(8, "y"));
  ASSERT_TRUE(table.grad().is_sparse());
  const at::Tensor gradient = table.grad();
  const at::Tensor before = gradient.to_dense();
  loss.fail_at(kLate);
  EXPECT_THROW(pipeline.step({ids}, {}, rows(8, "y")), PipelineError);
  EXPECT_TRUE(table.grad().is_same(gradient));
  EXPECT_TRUE(same_tensor(before, table.grad().to_dense()));
}

// Each stage has two buffers: a running mean of its inputs and the number of its forwards.
Model with_statistics() {
  Model model = perceptron(2);
  for (std::size_t i = 0; i < model.stages.size(); ++i) {
    StageModule& stage = model.stages[i];
    const at::Device device = test_device(static_cast<int>(i));
    const at::Tensor mean = at::zeros({kWide}, device);
    const at::Tensor count = at::zeros({}, at::TensorOptions(device).dtype(at::kLong));
    stage.forward = [before = stage.forward, mean, count](const Args& args, const Kwargs& kwargs) -> c10::IValue {
      mean.mul_(0.9).add_(tensor(args, 0).detach().mean(0), 0.1);
      count.add_(1);
      return at::dropout(before(args, kwargs).toTensor(), 0.5, /*train=*/true);
    };
    stage.buffers = {{"mean", mean}, {"count", count}};
  }
  return model;
}

TEST(Rollback, RestoresBuffersAndRandomNumbers) {
  const Model model = with_statistics();
  const FailingLoss loss;
  Pipeline pipeline(model.build(), schedule_of(2), {.loss = loss.function()});
  const auto buffers = [](const Model& of) {
    std::vector<at::Tensor> values;
    for (const StageModule& stage : of.stages) {
      for (const auto& [name, buffer] : stage.buffers) values.push_back(buffer.clone());
    }
    return values;
  };
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const auto before = buffers(model);
  EXPECT_EQ(before[1].item<std::int64_t>(), kMicrobatches);
  loss.fail_at(kLate);
  EXPECT_THROW(pipeline.step({rows(8, "x")}, {}, rows(8, "y")), PipelineError);
  expect_equal(before, buffers(model));
  loss.fail_at(kLate);
  EXPECT_THROW(pipeline.eval({rows(8, "x")}, {}, rows(8, "y")), PipelineError);
  expect_equal(before, buffers(model));
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));

  // The result is that of a pipeline without a failure.
  const Model other = with_statistics();
  Pipeline plain(other.build(), schedule_of(2), {.loss = squared_error});
  for (int i = 0; i < 2; ++i) plain.step({rows(8, "x")}, {}, rows(8, "y"));
  expect_equal(buffers(other), buffers(model));
  expect_equal(gradients_of(other), gradients_of(model));
}

TEST(Rollback, RestoresGradientsOfInputs) {
  const Model model = perceptron(2);
  const FailingLoss loss;
  Pipeline pipeline(model.build(), schedule_of(2), {.loss = loss.function()});
  const auto fail = [&](const at::Tensor& x) {
    loss.fail_at(kLate);
    EXPECT_THROW(pipeline.step({x}, {}, rows(8, "y")), PipelineError);
  };
  const at::Tensor x = rows(8, "x").clone().requires_grad_();
  fail(x);
  EXPECT_FALSE(x.grad().defined());
  pipeline.step({x}, {}, rows(8, "y"));
  const at::Tensor gradient = x.grad();
  const at::Tensor before = gradient.clone();
  EXPECT_GT(before.abs().sum().item<double>(), 0);
  fail(x);
  EXPECT_TRUE(x.grad().is_same(gradient));
  EXPECT_TRUE(same_tensor(before, gradient));
  // The gradient of a leaf from which the batch was computed is restored too.
  const at::Tensor behind = rows(8, "x").clone().requires_grad_();
  fail(behind + 1);
  EXPECT_FALSE(behind.grad().defined());
}

// The last stage returns `output` of its result.
Pipeline pipeline_with_output(const std::function<c10::IValue(const at::Tensor&)>& output,
                              std::optional<c10::IValue> spec = std::nullopt, int replicas = 1) {
  std::vector<StagedModel> all;
  for (int i = 0; i < replicas; ++i) {
    Model model = perceptron(2);
    model.stages[1].forward = [before = model.stages[1].forward, output](const Args& args,
                                                                         const Kwargs& kwargs) -> c10::IValue {
      return output(before(args, kwargs).toTensor());
    };
    all.push_back(model.build());
  }
  PipelineOptions options{.loss = [](const c10::IValue& value, const c10::IValue& target, const Kwargs& kwargs) {
    return squared_error(value.isTuple() ? value.toTupleRef().elements()[0] : value, target, kwargs);
  }};
  options.output_merge_spec = std::move(spec);
  return Pipeline(std::move(all), schedule_of(2), options);
}

TEST(Rollback, OfOutputsThatCannotBeMergedComesBeforeTheFirstBackward) {
  Pipeline pipeline = pipeline_with_output(
      [](const at::Tensor& y) -> c10::IValue { return c10::ivalue::Tuple::create({y, y.detach().mean()}); });
  const std::string error = without_devices(message_of([&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); }));
  const std::string expected =
      "rank 1, stage 1, 1F0 (microbatch 0): the outputs of the microbatches cannot be merged: chunks[0][1]: found "
      "float32 tensor of shape [], which has no dimension 0 to join along.\n"
      "  Hint: a reducer, such as sum_reducer(), merges scalars.";
  EXPECT_EQ(error.substr(0, expected.size()), expected);
  for (const Gradient& gradient : visible_gradients(pipeline)) EXPECT_FALSE(gradient.tensor.defined());
  StepOptions without;
  without.return_outputs = false;
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"), without);
}

TEST(Rollback, OfOutputsThatDoNotFitEachOtherRestoresGradients) {
  // The third microbatch has fewer columns.
  const auto count = std::make_shared<std::atomic<int>>(0);
  Pipeline pipeline = pipeline_with_output([count](const at::Tensor& y) -> c10::IValue {
    return c10::ivalue::Tuple::create({y, (*count)++ == 2 ? y.detach().narrow(1, 0, 3) : y.detach()});
  });
  const std::string error = without_devices(message_of([&] { pipeline.step({rows(8, "x")}, {}, rows(8, "y")); }));
  const std::string expected =
      "rank 1, stage 1, 1F3 (microbatch 3): the outputs of the microbatches cannot be merged: chunks[2][1]: found "
      "float32 tensor of shape [2, 3], which cannot follow chunks[0][1], float32 tensor of shape [2, 8], along "
      "dimension "
      "0.";
  EXPECT_EQ(error.substr(0, expected.size()), expected);
  for (const Gradient& gradient : visible_gradients(pipeline)) EXPECT_FALSE(gradient.tensor.defined());
}

TEST(Rollback, OfAMergeThatFailsAfterTheBackwardsRestoresGradients) {
  const auto fails = std::make_shared<std::atomic<bool>>(false);
  const CustomReducer reducer(at::zeros({}), [fails](const c10::IValue& sum, const c10::IValue& part) -> c10::IValue {
    if (*fails) throw std::runtime_error("no sum");
    return sum.toTensor() + part.toTensor().sum();
  });
  Pipeline pipeline = pipeline_with_output([](const at::Tensor& y) -> c10::IValue { return y; }, reducer);
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  const auto before = visible_gradients(pipeline);
  *fails = true;
  EXPECT_THROW(pipeline.step({rows(8, "x")}, {}, rows(8, "y")), ChunkError);
  expect_the_same(before, visible_gradients(pipeline));
  *fails = false;
  pipeline.step({rows(8, "x")}, {}, rows(8, "y"));

  // The outputs of one replica can be merged, but not with those of the other.
  Pipeline uneven = pipeline_with_output(
      [columns = std::make_shared<std::atomic<int>>(3)](const at::Tensor& y) -> c10::IValue {
        thread_local const std::int64_t own = (*columns)++;
        return c10::ivalue::Tuple::create({y, y.detach().narrow(1, 0, own)});
      },
      std::nullopt, /*replicas=*/2);
  EXPECT_THROW(uneven.step({rows(16, "x")}, {}, rows(16, "y")), ChunkError);
  for (const Gradient& gradient : visible_gradients(uneven)) EXPECT_FALSE(gradient.tensor.defined());
}

}  // namespace
}  // namespace penstock::internal::testing
