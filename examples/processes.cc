// A pipeline of process ranks. Each process runs this program with one stage, and trains it together with the others. The
// launcher gives each process its rank in the environment, as torchrun does.
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
  const penstock::Rendezvous rendezvous = penstock::rendezvous();
  torch::manual_seed(rendezvous.rank);
  const torch::nn::Sequential module(torch::nn::Linear(16, 16), torch::nn::Tanh());

  std::vector<penstock::PipelineStage> stages;
  stages.emplace_back(penstock::stage_module(module), /*stage_index=*/rendezvous.rank, /*num_stages=*/rendezvous.ranks);
  const penstock::Schedule schedule = penstock::generate("1F1B", {.ranks = rendezvous.ranks, .microbatches = 8});
  penstock::Pipeline pipeline(std::move(stages), schedule,
                              {.transport = penstock::c10d_transport(rendezvous), .loss = squared_error});

  torch::optim::SGD optimizer(module->parameters(), /*lr=*/0.5);
  torch::manual_seed(7);
  const at::Tensor x = at::randn({64, 16});
  const at::Tensor y = at::sin(x);
  for (int step = 0; step <= 200; ++step) {
    optimizer.zero_grad();
    const penstock::StepResult result = pipeline.step({x}, {}, y);
    optimizer.step();
    // Only the process with the last stage has losses.
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
