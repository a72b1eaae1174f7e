// Trains a model that torch.export.save has written, in two stages on two ranks, and writes its weights.
#include <iostream>
#include <map>
#include <string>

#include "penstock/program/inputs.h"
#include "penstock/program/pipe.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "penstock/tensor/safetensors.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: example_program MODEL.pt2 WEIGHTS.safetensors\n";
    return 2;
  }
  const penstock::Pipe pipe = penstock::pipeline(penstock::Program(argv[1]), /*stages=*/2);
  std::cout << pipe;

  const penstock::Schedule schedule = penstock::generate("1F1B", {.ranks = 2, .microbatches = 4});
  const auto loss = [](const c10::IValue& output, const c10::IValue&, const penstock::Kwargs&) {
    return output.toTensor().square().mean();
  };
  penstock::Pipeline pipeline(pipe.build(), schedule, {.loss = loss});
  const penstock::Arguments batch =
      penstock::arguments_from(pipe.program(), penstock::example_inputs(pipe.program(), 4, /*seed=*/0));
  for (int step = 0; step < 5; ++step) {
    const penstock::StepResult result = pipeline.step(batch.args, batch.kwargs, at::Tensor());
    double sum = 0;
    for (const at::Tensor& microbatch_loss : result.losses) sum += microbatch_loss.item<double>();
    std::cout << "step " << step << ": loss " << sum / 4 << "\n";
    for (const penstock::PipelineStage& stage : pipeline.stages()) {
      for (const auto& [name, parameter] : stage.parameters()) {
        if (!parameter.grad().defined()) continue;
        parameter.data().sub_(parameter.grad(), /*alpha=*/0.05);
        parameter.mutable_grad().reset();
      }
    }
  }
  // The names are those of the model's state_dict, so that load_state_dict in Python takes the file.
  std::map<std::string, at::Tensor> weights;
  for (int stage = 0; stage < pipe.num_stages(); ++stage) {
    for (const auto& [name, tensor] : pipe.state_dict(stage)) weights.emplace(name, tensor);
  }
  penstock::write_safetensors(argv[2], {weights.begin(), weights.end()});
}
