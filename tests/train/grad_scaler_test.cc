// Loss scaling for float16: the rules of torch.amp.GradScaler, and a training run that uses them.
#include "penstock/train/grad_scaler.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/trainer.h"
#include "tests/tensor/folder.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

std::string written_by_python(const std::string& name) {
  const char* const folder = std::getenv("PENSTOCK_TRAINING");
  if (folder == nullptr) throw std::runtime_error("PENSTOCK_TRAINING should be a directory of trainer_reference.py.");
  return std::string(folder) + "/" + name;
}

std::map<std::string, at::Tensor> numbers_of(const std::string& name) {
  const NamedTensors read = read_safetensors(written_by_python(name));
  return {read.begin(), read.end()};
}

TEST(GradScaler, HalvesItsScaleAtAnOverflowAndDoublesItAfterManyStepsWithout) {
  GradScaler scaler;
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_EQ(scaler.unscale(), 1.0 / 65536);
  scaler.update(/*found_inf=*/true);
  EXPECT_EQ(scaler.scale(), 32768);
  for (int step = 0; step < 1999; ++step) scaler.update(/*found_inf=*/false);
  EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 32768, .growth_tracker = 1999}));
  scaler.update(/*found_inf=*/false);
  EXPECT_EQ(scaler.state(), (GradScaler::State{.scale = 65536, .growth_tracker = 0}));
}

TEST(GradScaler, ContinuesFromItsState) {
  GradScaler scaler({.initial_scale = 8, .growth_interval = 3});
  scaler.update(false);
  scaler.update(false);
  GradScaler loaded({.growth_interval = 3});
  loaded.load(scaler.state());
  loaded.update(false);
  EXPECT_EQ(loaded.scale(), 16);
}

TEST(GradScaler, RefusesOptionsAndStatesThatAreNotValid) {
  EXPECT_EQ(message_of([] { GradScaler({.initial_scale = 0}); }), "the initial loss scale should be positive.");
  EXPECT_EQ(message_of([] { GradScaler({.growth_factor = 1}); }),
            "the growth factor of the loss scale should be above 1.");
  EXPECT_EQ(message_of([] { GradScaler({.backoff_factor = 1}); }),
            "the backoff factor of the loss scale should be between 0 and 1.");
  EXPECT_EQ(message_of([] { GradScaler({.growth_interval = 0}); }), "the growth interval should be at least 1 step.");
  GradScaler scaler;
  EXPECT_EQ(message_of([&] { scaler.load({.scale = 0}); }), "the state of the gradient scaler is not valid.");
}

TEST(GradScalerReference, HasTheScalesOfPyTorch) {
  const auto given = numbers_of("scaler.safetensors");
  const std::map<std::string, GradScalerOptions> options{
      {"default", {}},
      {"quick", {.initial_scale = 1000, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 3}},
      {"largest", {.initial_scale = 0x1p126, .growth_interval = 1}}};
  for (const auto& [name, chosen] : options) {
    GradScaler scaler(chosen);
    for (std::int64_t step = 0; step < given.at("found_inf").numel(); ++step) {
      SCOPED_TRACE(name + ", step " + std::to_string(step));
      const bool found_inf = given.at("found_inf")[step].item<bool>();
      if (!found_inf) {
        EXPECT_EQ(scaler.unscale(), given.at("inverse." + name)[step].item<double>());
      }
      scaler.update(found_inf);
      EXPECT_EQ(scaler.scale(), given.at("scale." + name)[step].item<double>());
      EXPECT_EQ(scaler.state().growth_tracker, given.at("growth_tracker." + name)[step].item<std::int64_t>());
    }
  }
}

// The batches of the Python script, compared by the mean squared error.
class SquaredErrorData final : public Data {
 public:
  explicit SquaredErrorData(const std::map<std::string, at::Tensor>& given) : given_(given) {}

  Batch batch(std::int64_t number) const override {
    const std::string suffix = "." + std::to_string(number);
    return {.args = {given_.at("ids" + suffix)}, .kwargs = {}, .target = given_.at("target" + suffix)};
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    return at::mse_loss(output.toTensor(), target.toTensor());
  }
  std::int64_t size_of(const Batch& batch) const override { return rows_of(batch); }
  std::string unit() const override { return "rows"; }
  std::string description() const override { return "given"; }

 private:
  const std::map<std::string, at::Tensor>& given_;
};

TEST(GradScalerReference, TrainsInFloat16AsPyTorchDoes) {
  const auto given = numbers_of("half.safetensors");
  const SquaredErrorData data(given);
  for (const int stages : {1, 2}) {
    Program program(written_by_python("half.pt2"));
    program.set_autocast(at::kHalf);
    std::vector<std::unique_ptr<Model>> replicas;
    replicas.push_back(program_model(stages == 1 ? pipeline(program) : pipeline(program, stages)));
    TrainerOptions options;
    options.optimizer = {.name = "sgd", .momentum = 0, .weight_decay = 0};
    options.learning_rate = {.rate = 0.1, .schedule = "constant", .warmup = 0};
    options.clip = 0.5;
    options.grad_scaler = GradScalerOptions{.initial_scale = 0x1p24, .growth_interval = 3};
    Trainer trainer(std::move(replicas), data, generate("1F1B", {.ranks = stages, .microbatches = 4}), options);
    int skipped = 0;
    for (std::int64_t step = 0; step < given.at("losses").numel(); ++step) {
      SCOPED_TRACE("stages " + std::to_string(stages) + ", step " + std::to_string(step));
      const StepReport report = trainer.step();
      EXPECT_EQ(report.loss_scale, given.at("scales")[step].item<double>());
      EXPECT_EQ(!report.skipped.empty(), given.at("skipped")[step].item<bool>()) << report.skipped;
      EXPECT_NEAR(report.loss, given.at("losses")[step].item<double>(), 1e-3);
      if (!report.skipped.empty()) ++skipped;
    }
    EXPECT_GT(skipped, 3);
  }
}

}  // namespace
}  // namespace penstock::internal::testing
