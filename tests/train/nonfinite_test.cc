// Losses and gradients that are NaN or infinite: such a step changes nothing, and no checkpoint contains them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/device/device_list.h"
#include "penstock/schedule/generators.h"
#include "penstock/train/trainer.h"
#include "tests/device/test_devices.h"
#include "tests/tensor/folder.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

// Two stages, each a matrix product, and a buffer that counts the forwards of the first.
class Products final : public Model {
 public:
  int num_stages() const override { return 2; }
  WeightBytes weight_bytes(std::span<const int> /*stages*/) const override { return {.weights = 40, .gradients = 36}; }
  using Model::build_stage;
  PipelineStage build_stage(int stage, at::Device device) const override {
    const at::Tensor weight = at::full({3, 3}, 0.1).fill_diagonal_(0.5 + stage).to(device).requires_grad_();
    const at::Tensor count = at::zeros({}, device);
    StageModule module;
    module.forward = [weight, count](const Args& args, const Kwargs&) -> c10::IValue {
      count.add_(1);
      return at::matmul(args[0].toTensor(), weight);
    };
    module.parameters = {{name_of(stage), weight}};
    if (stage == 0) module.buffers = {{"count", count}};
    return {module, stage, 2, StageOptions{.device = device}};
  }
  std::vector<std::string> parameter_names() const override { return {name_of(0), name_of(1)}; }
  std::string description() const override { return "products"; }
  void set_training(bool /*training*/) override {}
  bool is_training() const override { return true; }

 private:
  static std::string name_of(int stage) { return "weight" + std::to_string(stage); }
};

// Rows of ones. In chosen batches the loss, or its gradient alone, is not finite from the chosen row on.
class GivenRows final : public Data {
 public:
  enum class Bad { Nothing, Loss, Gradient };

  Batch batch(std::int64_t number) const override {
    at::Tensor target = at::ones({8, 3});
    if (number >= first_bad && number < last_bad) target[5][0] = bad == Bad::Loss ? kNan : kMark;
    return {.args = {at::ones({8, 3})}, .kwargs = {}, .target = target, .name = "batch-" + std::to_string(number)};
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    const at::Tensor wanted = target.toTensor();
    const at::Tensor loss = at::mse_loss(output.toTensor(), at::where(wanted == kMark, 1.0, wanted));
    // The added term is 0, and its derivative is infinity times 0.
    return wanted.eq(kMark).any().item<bool>() ? loss + at::sqrt(output.toTensor().sum() * 0) : loss;
  }
  std::int64_t size_of(const Batch& batch) const override { return rows_of(batch); }
  std::string unit() const override { return "rows"; }
  std::string description() const override { return "rows"; }

  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  static constexpr float kMark = 77;
  Bad bad = Bad::Nothing;
  std::int64_t first_bad = 0;
  std::int64_t last_bad = 0;
};

struct RunCase {
  OnNonFinite on_nonfinite = OnNonFinite::Stop;
  int replicas = 1;
  bool sharded = false;
  int accumulate = 1;
  int max_skipped = 2;
  double clip = 0;
  double rate = 0.01;
};

std::unique_ptr<Trainer> trainer_of(const GivenRows& data, const RunCase& setup) {
  std::vector<std::unique_ptr<Model>> models;
  for (int i = 0; i < setup.replicas; ++i) models.push_back(std::make_unique<Products>());
  TrainerOptions options;
  options.steps = 20;
  options.optimizer = {.name = "sgd", .momentum = 0.9};
  options.learning_rate = {.rate = setup.rate, .schedule = "constant", .warmup = 0};
  options.accumulate = setup.accumulate;
  options.clip = setup.clip;
  options.on_nonfinite = setup.on_nonfinite;
  options.max_skipped = setup.max_skipped;
  options.sharded = setup.sharded;
  options.timeout = std::chrono::seconds(60);
  if (is_on_devices()) options.devices = parse_devices("sim").complete();
  return std::make_unique<Trainer>(
      std::move(models), data, generate("1F1B", {.ranks = 2, .microbatches = 4 / setup.replicas}), std::move(options));
}

// Returns a copy of everything that a step changes.
std::vector<at::Tensor> state_of(Trainer& trainer) {
  std::vector<at::Tensor> state;
  for (int replica = 0; replica < trainer.pipeline().replicas(); ++replica) {
    for (const PipelineStage& stage : trainer.pipeline().stages(replica)) {
      for (const auto& [name, parameter] : stage.parameters()) {
        state.push_back(parameter.detach().clone());
        EXPECT_FALSE(parameter.grad().defined());
      }
      for (const auto& [name, buffer] : stage.module().buffers) state.push_back(buffer.clone());
    }
  }
  return state;
}
void expect_same_state(const std::vector<at::Tensor>& expected, const std::vector<at::Tensor>& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(expected[i], found[i])) << i;
}

constexpr const char* kHint =
    "\n  Hint: look at the data, lower the learning rate, lower the clipping norm, or skip such steps.";

TEST(NonFinite, LossStopsBeforeTheOptimizerSteps) {
  GivenRows data;
  data.bad = GivenRows::Bad::Loss;
  data.first_bad = 1;
  data.last_bad = 2;
  for (const double clip : {0.0, 1.0}) {
    const auto trainer = trainer_of(data, {.clip = clip});
    EXPECT_GT(trainer->step().gradient_norm, 0);
    const std::vector<at::Tensor> before = state_of(*trainer);
    expect_error<NonFiniteError>(
        [&] { trainer->step(); },
        std::string("step 2, batch-1, microbatch 2 (rows 4 to 5), stage 1: the loss is NaN.\n"
                    "  The first parameter whose gradient is not finite is weight0 of stage 0.") +
            kHint);
    EXPECT_EQ(trainer->steps_done(), 1);
    expect_same_state(before, state_of(*trainer));
  }
}

TEST(NonFinite, GradientStopsBeforeTheOptimizerSteps) {
  GivenRows data;
  data.bad = GivenRows::Bad::Gradient;
  data.last_bad = 1;
  const auto trainer = trainer_of(data, {});
  const std::vector<at::Tensor> before = state_of(*trainer);
  expect_error<NonFiniteError>(
      [&] { trainer->step(); },
      std::string("step 1, batch-0, stage 0: the gradient of weight0 is not finite; the losses are.") + kHint);
  expect_same_state(before, state_of(*trainer));
}

TEST(NonFinite, StepsAreSkippedWithReplicasShardsAndAccumulation) {
  for (const RunCase& setup :
       {RunCase{.on_nonfinite = OnNonFinite::Skip}, RunCase{.on_nonfinite = OnNonFinite::Skip, .accumulate = 2},
        RunCase{.on_nonfinite = OnNonFinite::Skip, .replicas = 2, .accumulate = 2},
        RunCase{.on_nonfinite = OnNonFinite::Skip, .replicas = 2, .sharded = true, .accumulate = 2}}) {
    SCOPED_TRACE(std::to_string(setup.replicas) + " replicas, " + std::to_string(setup.accumulate) + " batches");
    GivenRows data;
    data.bad = GivenRows::Bad::Loss;
    // Steps 2 and 3.
    data.first_bad = setup.accumulate;
    data.last_bad = data.first_bad + 2L * setup.accumulate;
    const auto trainer = trainer_of(data, setup);
    EXPECT_TRUE(trainer->step().skipped.empty());
    const std::vector<at::Tensor> before = state_of(*trainer);
    for (int step = 2; step <= 3; ++step) {
      const StepReport report = trainer->step();
      EXPECT_EQ(report.step, step);
      EXPECT_TRUE(std::isnan(report.loss));
      const std::string batch = ", batch-" + std::to_string((step - 1) * setup.accumulate);
      const std::string microbatch = setup.replicas == 1 ? "microbatch 2" : "microbatch 0 of replica 1";
      EXPECT_EQ(report.skipped,
                "step " + std::to_string(step) + batch + ", " + microbatch +
                    " (rows 4 to 5), stage 1: the loss is NaN.\n  The first parameter whose gradient is "
                    "not finite is weight0 of stage 0.");
      expect_same_state(before, state_of(*trainer));
    }
    const StepReport good = trainer->step();
    EXPECT_EQ(good.step, 4);
    EXPECT_TRUE(good.skipped.empty());
    EXPECT_FALSE(at::equal(before.front(), state_of(*trainer).front()));
  }
}

TEST(NonFinite, OnlyALimitedNumberOfStepsIsSkippedInARow) {
  GivenRows data;
  data.bad = GivenRows::Bad::Loss;
  data.last_bad = 20;
  const auto trainer = trainer_of(data, {.on_nonfinite = OnNonFinite::Skip});
  trainer->step();
  trainer->step();
  expect_error<NonFiniteError>([&] { trainer->step(); },
                               "step 3, batch-2, microbatch 2 (rows 4 to 5), stage 1: the loss is NaN.\n"
                               "  The first parameter whose gradient is not finite is weight0 of stage 0.\n"
                               "  The 2 steps before it were skipped too."
                               "\n  Hint: allow more skipped steps in a row.");
  EXPECT_EQ(trainer->steps_done(), 2);
}

TEST(NonFinite, ParametersAreNotSaved) {
  const GivenRows data;
  const auto trainer = trainer_of(data, {});
  const Folder folder;
  trainer->step();
  trainer->save(folder.path(), 3, "{}");
  trainer->step();
  {
    const c10::NoGradGuard no_grad;
    trainer->pipeline().stages()[1].parameters()[0].second[1][1] = std::numeric_limits<float>::infinity();
  }
  expect_error<CheckpointError>([&] { trainer->save(folder.path(), 3, "{}"); },
                                folder / "step-00000002" +
                                    ": is not written, because parameter weight1 of stage 1 is not finite; earlier "
                                    "checkpoints remain.\n  Hint: lower the learning rate or lower the "
                                    "clipping norm, and resume from the last of them.");
  EXPECT_EQ(Checkpoint(folder.path()).info().step, 1);
}

// Errors name the batch if it cannot be split, and also the rows if a microbatch fails.
TEST(DataErrors, NameTheBatchAndTheRows) {
  class Failing final : public Data {
   public:
    Batch batch(std::int64_t number) const override {
      const std::int64_t rows = number == 1 ? 3 : 13;
      return {.args = {at::ones({rows, 3})}, .kwargs = {}, .target = at::ones({rows}, at::kLong), .name = "some.file"};
    }
    at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
      return at::cross_entropy_loss(output.toTensor(), target.toTensor().add(output.toTensor().size(0) == 3 ? 4 : 0));
    }
    std::int64_t size_of(const Batch& batch) const override { return rows_of(batch); }
    std::string unit() const override { return "rows"; }
    std::string description() const override { return "rows"; }
  };
  const Failing data;
  for (const int replicas : {1, 2}) {
    std::vector<std::unique_ptr<Model>> models;
    for (int i = 0; i < replicas; ++i) models.push_back(std::make_unique<Products>());
    Trainer trainer(std::move(models), data, generate("GPipe", {.ranks = 2, .microbatches = replicas == 1 ? 6 : 3}),
                    {.timeout = std::chrono::seconds(60)});
    const auto error_with = [&](const std::function<void()>& act) -> std::string {
      try {
        act();
      } catch (const std::exception& error) {
        return error.what();
      }
      return "no error";
    };
    // 13 rows: 3 in the first of six microbatches, or 7 and 6 of two replicas, and of these 3 in the first of three.
    const std::string begins = "some.file, rows 0 to 2: " + std::string(replicas == 2 ? "replica 0, " : "") +
                               "rank 1, stage 1, 1F0 (microbatch 0): Target 5 is out of bounds.";
    EXPECT_EQ(error_with([&] { trainer.step(); }).substr(0, begins.size()), begins);
    EXPECT_EQ(error_with([&] { trainer.evaluate({data.batch(0)}); }).substr(0, begins.size()), begins);
    EXPECT_EQ(error_with([&] { trainer.evaluate({data.batch(1)}); }),
              replicas == 1
                  ? "some.file: the arguments can be split into 3 only, and there are 6 microbatches.\n  Hint: "
                    "give at least 6 rows, or take fewer microbatches."
                  : "some.file: the arguments can be split into 2 only, and there are 3 microbatches.\n  Hint: "
                    "give at least 3 rows, or take fewer microbatches.");
  }
}

// All targets of a step are ignored.
TEST(DataErrors, NameAStepInWhichNothingCounts) {
  class Nothing final : public Data {
   public:
    Batch batch(std::int64_t) const override {
      return {.args = {at::ones({8, 3})}, .kwargs = {}, .target = at::full({8}, -100, at::kLong), .name = "some.file"};
    }
    at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
      return at::cross_entropy_loss(output.toTensor(), target.toTensor());
    }
    double loss_weight(const Batch& microbatch) const override { return count_targets()(microbatch.target, {}); }
    std::int64_t size_of(const Batch& batch) const override { return rows_of(batch); }
    std::string unit() const override { return "rows"; }
    std::string description() const override { return "rows"; }
  };
  const Nothing data;
  std::vector<std::unique_ptr<Model>> models;
  models.push_back(std::make_unique<Products>());
  Trainer trainer(std::move(models), data, generate("1F1B", {.ranks = 2, .microbatches = 4}), {});
  expect_error<NonFiniteError>([&] { trainer.step(); },
                               "step 1, some.file: there is no target that counts: all of them are ignored."
                               "\n  Hint: check which target is ignored, or skip such steps.");
  const Trainer::Evaluation evaluation = trainer.evaluate({data.batch(0)});
  EXPECT_TRUE(std::isnan(evaluation.loss));
  expect_error<NonFiniteError>([&] { trainer.require_finite(evaluation); },
                               "the evaluation after step 0: there is no target that counts: all of them are ignored."
                               "\n  Hint: look at the data and the weights.");
  models.clear();
  models.push_back(std::make_unique<Products>());
  TrainerOptions skips;
  skips.on_nonfinite = OnNonFinite::Skip;
  if (is_on_devices()) skips.devices = parse_devices("sim").complete();
  Trainer skipping(std::move(models), data, generate("1F1B", {.ranks = 2, .microbatches = 4}), skips);
  const StepReport report = skipping.step();
  EXPECT_EQ(report.skipped, "step 1, some.file: there is no target that counts: all of them are ignored.");
  EXPECT_TRUE(std::isnan(report.loss));
  EXPECT_EQ(skipping.steps_done(), 1);
  EXPECT_TRUE(std::isnan(skipping.evaluate({data.batch(0)}).loss));
}

TEST(NonFinite, EvaluationStopsOrReportsTheMicrobatch) {
  GivenRows data;
  data.bad = GivenRows::Bad::Loss;
  data.first_bad = 1;
  data.last_bad = 2;
  const std::vector<Batch> batches{data.batch(0), data.batch(1)};
  const std::string where =
      "the evaluation after step 0, batch-1, microbatch 2 (rows 4 to 5), stage 1: the loss is NaN.";
  const auto stopping = trainer_of(data, {});
  const Trainer::Evaluation evaluation = stopping->evaluate(batches);
  EXPECT_EQ(evaluation.nonfinite, where);
  EXPECT_TRUE(std::isnan(evaluation.loss));
  expect_error<NonFiniteError>([&] { stopping->require_finite(evaluation); },
                               where + "\n  Hint: look at the data and the weights.");
  EXPECT_NO_THROW(trainer_of(data, {.on_nonfinite = OnNonFinite::Skip})->require_finite(evaluation));
  EXPECT_EQ(stopping->evaluate({data.batch(0)}).nonfinite, "");
}

}  // namespace
}  // namespace penstock::internal::testing
