// Training as plain PyTorch does it: trainer_peer.py has written what that gives.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

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

namespace penstock::testing {
namespace {

// The batches that Python had.
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
  std::int64_t size_of(const Batch& batch) const override { return batch.args[0].toTensor().numel(); }
  std::string unit() const override { return "bytes"; }
  std::string description() const override { return "given"; }

 private:
  const std::map<std::string, at::Tensor>& given_;
};

std::string written(const std::string& name) {
  const char* const folder = std::getenv("PENSTOCK_TRAINING");
  if (folder == nullptr) {
    throw std::runtime_error("PENSTOCK_TRAINING should be a folder that trainer_peer.py has written.");
  }
  return std::string(folder) + "/" + name;
}

std::map<std::string, at::Tensor> tensors_of(const std::string& name) {
  const NamedTensors read = read_safetensors(written(name));
  return {read.begin(), read.end()};
}

TEST(TrainerPeer, HasTheLossesOfPlainPyTorch) {
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
    // By way of a checkpoint, which has the same names.
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
    for (std::int64_t step = 0; step < expected.size(0); ++step) {
      EXPECT_NEAR(trainer.step().loss, expected[step].item<double>(), 1e-4) << step;
    }
  }
}

// A complex parameter, and one whose gradients are sparse in one stage and dense in another.
TEST(TrainerPeer, StepsComplexAndSparseGradientsAsPlainPyTorch) {
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
}  // namespace penstock::testing
