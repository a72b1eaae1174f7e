// Compares training with plain PyTorch, whose results trainer_reference.py has written.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/pipe.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/checkpoint_writer.h"
#include "penstock/train/trainer.h"
#include "tests/tensor/folder.h"

namespace penstock::internal::testing {
namespace {

// The batches that the Python script has trained on.
class GivenData final : public Data {
 public:
  explicit GivenData(const std::map<std::string, at::Tensor>& given) : given_(given) {}

  Batch batch(std::int64_t number) const override {
    return {.args = {given_.at("ids." + std::to_string(number))},
            .kwargs = {},
            .target = given_.at("target." + std::to_string(number))};
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    return at::cross_entropy_loss(output.toTensor().flatten(0, 1), target.toTensor().flatten());
  }
  double loss_weight(const Batch& microbatch) const override { return count_targets()(microbatch.target, {}); }
  std::int64_t size_of(const Batch& batch) const override { return batch.args[0].toTensor().numel(); }
  std::string unit() const override { return "bytes"; }
  std::string description() const override { return "given"; }

 private:
  const std::map<std::string, at::Tensor>& given_;
};

std::string written(const std::string& name) {
  const char* const folder = std::getenv("PENSTOCK_TRAINING");
  if (folder == nullptr) {
    throw std::runtime_error("PENSTOCK_TRAINING should be a directory that trainer_reference.py has written.");
  }
  return std::string(folder) + "/" + name;
}

std::map<std::string, at::Tensor> tensors_of(const std::string& name) {
  const NamedTensors read = read_safetensors(written(name));
  return {read.begin(), read.end()};
}

// Loads the initial weights of the Python script through a checkpoint, which uses the same names.
void load_weights(Trainer& trainer, const std::map<std::string, at::Tensor>& given) {
  const Folder kept;
  const CheckpointWriter writer(kept.path(), 0);
  writer.begin();
  NamedTensors weights;
  for (const auto& [key, tensor] : given) {
    if (key.starts_with("weight.")) weights.emplace_back(key.substr(7), tensor);
  }
  writer.write_part(0, weights, {});
  writer.finish({.step = 0, .model = trainer.model().description()}, 1, 1);
  trainer.load(Checkpoint(kept.path()));
}

TEST(TrainerReference, HasTheLossesOfPlainPyTorch) {
  const std::map<std::string, at::Tensor> given = tensors_of("training.safetensors");
  const at::Tensor expected = given.at("losses");
  const GivenData data(given);
  for (const std::string name : {"1F1B", "ZBVZeroBubble"}) {
    SCOPED_TRACE(name);
    const Schedule schedule =
        generate(name, {.ranks = 2, .stages_per_rank = name == "1F1B" ? 1 : 2, .microbatches = 4});
    std::vector<std::unique_ptr<Model>> models;
    models.push_back(gpt_model({.layers = 3, .width = 32, .heads = 4, .length = 12}, /*seed=*/0, schedule.stages()));
    TrainerOptions options;
    options.steps = expected.size(0);
    options.learning_rate.warmup = 10;
    options.clip = 0.5;
    Trainer trainer(std::move(models), data, schedule, std::move(options));
    load_weights(trainer, given);
    for (std::int64_t step = 0; step < expected.size(0); ++step) {
      EXPECT_NEAR(trainer.step().loss, expected[step].item<double>(), 1e-4) << step;
    }
  }
}

// Loss, norm and gradients of 13 rows in 8 microbatches, in two replicas, and of three such batches per step equal
// those of PyTorch on all rows at once. A step of SGD with a learning rate of 1 shows the gradients.
TEST(TrainerReference, HasTheLossAndGradientsOfPlainPyTorchOnTheWholeBatch) {
  const std::map<std::string, at::Tensor> given = tensors_of("weighted.safetensors");
  const GivenData data(given);
  struct Case {
    int accumulate;
    int replicas;
    bool sharded;
  };
  for (const Case& setup :
       {Case{1, 1, false}, Case{3, 1, false}, Case{1, 2, false}, Case{3, 2, false}, Case{3, 2, true}}) {
    SCOPED_TRACE(std::to_string(setup.accumulate) + " batches, " + std::to_string(setup.replicas) + " replicas" +
                 (setup.sharded ? ", sharded" : ""));
    const std::string number = std::to_string(setup.accumulate);
    const auto expected = given.at("loss." + number).item<double>();
    const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = setup.replicas == 1 ? 8 : 6});
    std::vector<std::unique_ptr<Model>> models;
    for (int i = 0; i < setup.replicas; ++i) {
      models.push_back(gpt_model({.layers = 2, .width = 16, .heads = 4, .length = 12}, /*seed=*/0, schedule.stages()));
    }
    TrainerOptions options;
    options.learning_rate = {.rate = 1, .schedule = "constant", .warmup = 0};
    options.optimizer = {.name = "sgd", .momentum = 0, .weight_decay = 0};
    options.clip = 0;
    options.accumulate = setup.accumulate;
    options.sharded = setup.sharded;
    Trainer trainer(std::move(models), data, schedule, std::move(options));
    load_weights(trainer, given);
    std::vector<Batch> batches;
    for (int i = 0; i < setup.accumulate; ++i) batches.push_back(data.batch(i));
    const double evaluated = trainer.evaluate(batches).loss;
    EXPECT_NEAR(evaluated, expected, 1e-5);
    const StepReport report = trainer.step();
    EXPECT_NEAR(report.loss, expected, 1e-5);
    const auto norm = given.at("norm." + number).item<double>();
    EXPECT_NEAR(report.gradient_norm, norm, 1e-5 * norm);
    const Folder kept;
    trainer.save(kept.path(), /*keep=*/1, "{}");
    const Checkpoint after(kept.path());
    double largest = 0;
    for (const auto& [key, gradient] : given) {
      if (!key.starts_with("grad." + number)) continue;
      const std::string name = key.substr(7);
      const at::Tensor found = given.at("weight." + name) - after.weight(name);
      const auto difference = (found - gradient).abs().max().item<double>();
      EXPECT_LE(difference, 1e-6) << name;
      largest = std::max(largest, difference);
    }
    std::cout << number << " batches, " << setup.replicas << (setup.sharded ? " sharded" : "") << " replicas: loss "
              << report.loss << " against " << expected << ", evaluated " << evaluated << ", norm "
              << report.gradient_norm << " against " << norm << ", gradients within " << largest << "\n";
  }
}

// The model has a complex parameter, and one whose gradients are sparse in one stage and dense in another.
TEST(TrainerReference, StepsComplexAndSparseGradientsAsPlainPyTorch) {
  const std::map<std::string, at::Tensor> given = tensors_of("strange.safetensors");
  const GivenData data(given);
  for (const std::string optimizer : {"sgd", "adam", "adamw"}) {
    const at::Tensor expected = given.at("losses." + optimizer);
    for (const int replicas : {1, 2}) {
      SCOPED_TRACE(optimizer + " with " + std::to_string(replicas) + " replicas");
      const auto make = [&] {
        const Schedule schedule = generate("1F1B", {.ranks = 2, .microbatches = 4 / replicas});
        std::vector<std::unique_ptr<Model>> models;
        for (int i = 0; i < replicas; ++i) {
          models.push_back(program_model(pipeline(Program(written("strange.pt2")), schedule.stages())));
        }
        TrainerOptions options;
        options.steps = expected.size(0);
        options.learning_rate = {.rate = 0.1, .schedule = "constant", .warmup = 0};
        options.optimizer.name = optimizer;
        options.clip = 0.5;
        return std::make_unique<Trainer>(std::move(models), data, schedule, std::move(options));
      };
      std::unique_ptr<Trainer> trainer = make();
      const Folder kept;
      for (std::int64_t step = 0; step < expected.size(0); ++step) {
        EXPECT_NEAR(trainer->step().loss, expected[step].item<double>(), 1e-4) << step;
        if (step != 5) continue;
        trainer->save(kept.path(), /*keep=*/1, "{}");
        trainer = make();
        trainer->load(Checkpoint(kept.path()));
      }
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
