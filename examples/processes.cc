// A pipeline whose ranks are processes: each of them runs this program, has one stage, and trains it together with the
// others. What starts them gives each its place in the environment, as torchrun does.
//
//   torchrun --nproc-per-node 2 --no-python example_processes
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <cstdio>
#include <exception>
#include <iostream>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/stage/modules.h"
#include "penstock/transport/c10d.h"

namespace {

at::Tensor squared_error(const c10::IValue& output, const c10::IValue& target, const penstock::Kwargs& /*kwargs*/) {
  return at::mse_loss(output.toTensor(), target.toTensor());
}

int train() {
  const penstock::Rendezvous place = penstock::rendezvous();
  torch::manual_seed(place.rank);
  const torch::nn::Sequential module(torch::nn::Linear(16, 16), torch::nn::Tanh());

  std::vector<penstock::PipelineStage> own;
  own.emplace_back(penstock::stage_module(module), /*stage_index=*/place.rank, /*num_stages=*/place.ranks);
  const penstock::Schedule schedule = penstock::generate("1F1B", {.ranks = place.ranks, .microbatches = 8});
  penstock::Pipeline pipeline(std::move(own), schedule,
                              {.transport = penstock::c10d_transport(place), .loss = squared_error});

  torch::optim::SGD optimizer(module->parameters(), /*lr=*/0.5);
  torch::manual_seed(7);
  const at::Tensor x = at::randn({64, 16});
  const at::Tensor y = at::sin(x);
  for (int step = 0; step <= 200; ++step) {
    optimizer.zero_grad();
    const penstock::StepResult result = pipeline.step({x}, {}, y);
    optimizer.step();
    // The losses are those of the last stage.
    if (!result.losses.empty() && step % 50 == 0) {
      std::printf("step %3d   loss %.4f\n", step, at::stack(result.losses).mean().item<double>());
    }
  }
  return 0;
}

}  // namespace

int main() {
  try {
    return train();
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
