// A model whose forwards write to a buffer, and data for it: tests of what a step writes to.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/device/device_list.h"
#include "penstock/schedule/generators.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::testing {

constexpr std::int64_t kMeanWidth = 6;

// Two stages, each a matrix product of what is left of its input without a running mean.
class RunningMean final : public Model {
 public:
  int num_stages() const override { return 2; }
  WeightBytes weight_bytes(std::span<const int> /*stages*/) const override { return {}; }
  using Model::build_stage;
  PipelineStage build_stage(int stage, at::Device device) const override {
    const at::Tensor initial = at::arange(kMeanWidth * kMeanWidth, at::kFloat).sin().view({kMeanWidth, kMeanWidth});
    const at::Tensor weight = initial.to(device).requires_grad_();
    const at::Tensor mean = at::zeros({kMeanWidth}, at::TensorOptions(device));
    StageModule module;
    module.forward = [weight, mean](const Args& args, const Kwargs&) -> c10::IValue {
      const at::Tensor& x = args[0].toTensor();
      {
        const at::NoGradGuard no_grad;
        mean.mul_(0.5).add_(x.mean(0), 0.5);
      }
      return at::tanh(at::matmul(x - mean, weight));
    };
    module.parameters = {{name_of("weight", stage), weight}};
    module.buffers = {{name_of("mean", stage), mean}};
    return {module, stage, 2, {.device = device}};
  }
  std::vector<std::string> parameter_names() const override { return {name_of("weight", 0), name_of("weight", 1)}; }
  std::vector<std::string> buffer_names() const override { return {name_of("mean", 0), name_of("mean", 1)}; }
  std::string description() const override { return "running mean"; }
  void set_training(bool /*training*/) override {}
  bool is_training() const override { return true; }

 private:
  static std::string name_of(const char* kind, int stage) { return kind + std::to_string(stage); }
};

class MeanRows final : public Data {
 public:
  Batch batch(std::int64_t number) const override {
    const at::Tensor x = (at::arange(8 * kMeanWidth, at::kFloat) + static_cast<double>(number)).cos();
    return {.args = {x.view({8, kMeanWidth})},
            .kwargs = {},
            .target = at::full({8, kMeanWidth}, 0.25),
            .name = "batch-" + std::to_string(number)};
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    return at::mse_loss(output.toTensor(), target.toTensor());
  }
  std::int64_t size_of(const Batch& batch) const override { return rows_of(batch); }
  std::string unit() const override { return "rows"; }
  std::string description() const override { return "rows"; }
};

struct MeanCase {
  std::string devices = "sim:0,1";
  std::string optimizer = "adamw";
  // Each replica of a sharded run stores a part of each weight.
  bool sharded = false;
};

inline std::unique_ptr<Trainer> mean_trainer(const MeanCase& setup) {
  static const MeanRows data;
  const int replica_count = setup.sharded ? 2 : 1;
  std::vector<std::unique_ptr<Model>> replicas;
  for (int i = 0; i < replica_count; ++i) replicas.push_back(std::make_unique<RunningMean>());
  TrainerOptions options;
  options.devices = parse_devices(setup.devices).complete();
  options.steps = 20;
  options.optimizer = {.name = setup.optimizer, .momentum = 0.9};
  options.learning_rate = {.rate = 0.01, .schedule = "constant", .warmup = 0};
  options.sharded = setup.sharded;
  options.timeout = std::chrono::seconds(60);
  return std::make_unique<Trainer>(
      std::move(replicas), data, generate("1F1B", {.ranks = 2, .microbatches = 4 / replica_count}), std::move(options));
}

}  // namespace penstock::internal::testing
