// penstock generate: generates text with a GPT that `penstock train` has trained.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "penstock/cli/checks.h"
#include "penstock/cli/devices.h"
#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/options.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/json.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/data.h"
#include "penstock/train/generate_text.h"
#include "penstock/train/model.h"

namespace penstock::internal::cli {
namespace {

// Returns the options of the GPT in a checkpoint, from the checkpoint's configuration.
GptOptions gpt_of(const Checkpoint& checkpoint) {
  const auto configuration = parse_json(checkpoint.info().configuration);
  if (!configuration.value("model", "").empty()) {
    throw std::runtime_error(checkpoint.path() +
                             ": has the weights of an exported model, not of a GPT.\n  Hint: run it with "
                             "penstock run MODEL.pt2 --weights " +
                             checkpoint.path() + ".");
  }
  GptOptions gpt{
      .layers = configuration.at("layers"), .width = configuration.at("width"), .heads = configuration.at("heads")};
  if (configuration.contains("data")) {
    gpt.length = configuration.at("length");
  } else {
    gpt.length = AdditionData(configuration.at("digits"), /*rows=*/1, /*seed=*/0).length();
  }
  const std::string dtype = configuration.value("dtype", "");
  if (dtype == "bfloat16") gpt.autocast = at::kBFloat16;
  if (dtype == "float16") gpt.autocast = at::kHalf;
  return gpt;
}

}  // namespace

void add_generate(CLI::App& command, int& /*exit*/) {
  struct Options {
    std::string checkpoint;
    std::string text;
    GenerateTextOptions generate;
    int ranks = 2;
    DeviceOption device;
  };
  const auto options = std::make_shared<Options>();
  command
      .add_option("CHECKPOINT", options->checkpoint,
                  "Checkpoint, or directory of checkpoints, of which the newest is used")
      ->required();
  command.add_option("TEXT", options->text, "Prompt to continue");
  command.add_option("--bytes", options->generate.bytes, "Number of bytes to generate")
      ->option_text("N [200]")
      ->check(whole_number());
  command.add_option("--temperature", options->generate.temperature, "Sampling temperature; 0 is greedy")
      ->option_text("T [0.8]")
      ->check(cost());
  command.add_option("--seed", options->generate.seed, "Seed of the random numbers for sampling")->option_text("S [0]");
  command.add_option("--ranks", options->ranks, "Number of ranks, each with one stage of the model")
      ->option_text("P [2]")
      ->check(whole_number());
  options->device.add_to(command);
  command.get_option("--device")
      ->description(
          "Devices of the ranks, which are threads of this process, dealt to them in turn; sim is a simulated device "
          "for tests (default: the CPU)");
  on_call(command, [options] {
    const DeviceList devices = options->device.load();
    const Checkpoint checkpoint(options->checkpoint);
    const GptOptions gpt = gpt_of(checkpoint);
    const std::unique_ptr<Model> model = gpt_model(
        gpt, /*seed=*/0, options->ranks, WeightFiles{.path = checkpoint.path(), .tensors = checkpoint.weights()});
    checkpoint.require_model({.description = model->description()});
    model->set_training(false);
    std::vector<PipelineStage> stages;
    for (int stage = 0; stage < options->ranks; ++stage) {
      stages.push_back(model->build_stage(stage, devices.of(stage)));
    }
    Pipeline pipeline(std::move(stages),
                      generate("ForwardOnly", {.ranks = options->ranks, .stages_per_rank = 1, .microbatches = 1}));
    std::cout << generate_text(pipeline, gpt.length, options->text, options->generate) << "\n";
  });
}

}  // namespace penstock::internal::cli
