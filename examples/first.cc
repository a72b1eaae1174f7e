#include <torch/nn.h>
#include <torch/optim/adam.h>

#include <cstdio>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/stage/modules.h"

using torch::nn::Linear, torch::nn::Sequential, torch::nn::Tanh;

at::Tensor squared_error(const c10::IValue& output, const c10::IValue& target, const penstock::Kwargs& /*kwargs*/) {
  return at::mse_loss(output.toTensor(), target.toTensor());
}

int main() {
  const Sequential halves[] = {Sequential(Linear(1, 64), Tanh(), Linear(64, 64), Tanh()),
                               Sequential(Linear(64, 64), Tanh(), Linear(64, 1))};
  std::vector<penstock::PipelineStage> stages;
  std::vector<at::Tensor> parameters;
  for (const Sequential& half : halves) {
    stages.emplace_back(penstock::stage_module(half), /*stage_index=*/stages.size(), /*num_stages=*/2);
    for (const at::Tensor& parameter : half->parameters()) parameters.push_back(parameter);
  }
  torch::optim::Adam optimizer(parameters, /*lr=*/1e-3);
  const penstock::Schedule schedule = penstock::generate("1F1B", {.ranks = 2, .microbatches = 8});
  penstock::Pipeline pipeline(std::move(stages), schedule, {.loss = squared_error});
  for (int step = 0; step <= 1000; ++step) {
    const at::Tensor x = at::rand({64, 1}) * 6 - 3;
    const penstock::StepResult result = pipeline.step({x}, {}, /*target=*/at::sin(x));
    optimizer.step();
    optimizer.zero_grad();
    if (step % 200 == 0) std::printf("step %4d   loss %.4f\n", step, at::stack(result.losses).mean().item<double>());
  }
}
