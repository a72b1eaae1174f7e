// penstock export: writes trained weights as safetensors, or as an exported model.
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

#include "penstock/cli/output.h"
#include "penstock/cli/program/commands.h"
#include "penstock/cli/program/options.h"
#include "penstock/program/program.h"
#include "penstock/schedule/json.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/weight_files.h"

namespace penstock::internal::cli {
namespace {

namespace fs = std::filesystem;

// Returns the tensors of the model's state_dict: all weights but non-persistent buffers.
NamedTensors state_dict_of(const WeightFiles& weights) {
  std::set<std::string> left_out;
  if (weights.checkpoint) {
    left_out.insert(weights.checkpoint->non_persistent_buffers.begin(),
                    weights.checkpoint->non_persistent_buffers.end());
  }
  NamedTensors state;
  for (const auto& [name, tensor] : weights.tensors) {
    if (!left_out.contains(name)) state.emplace_back(name, tensor);
  }
  return state;
}

// Returns the path of the exported model that was trained, from the checkpoint's configuration.
std::string model_of(const WeightFiles& weights) {
  std::string model;
  if (weights.checkpoint) model = parse_json(weights.checkpoint->configuration).value("model", "");
  if (!model.empty() && fs::exists(model)) return model;
  throw std::runtime_error(weights.path +
                           (model.empty() ? ": does not say which exported model it belongs to"
                                          : ": belongs to " + model + ", which does not exist") +
                           ".\n  Hint: name the exported model with --model MODEL.pt2.");
}

void require_other_file(const std::string& target, const std::string& model) {
  std::error_code ignored;
  if (!fs::equivalent(target, model, ignored)) return;
  throw std::runtime_error(
      target + ": is the model itself.\n  Hint: --pt2 names the file to write, and --model the one to read.");
}

}  // namespace

void add_export(CLI::App& command, int& /*exit*/) {
  struct Options {
    std::string checkpoint;
    std::string output;
    std::string model;
    std::string pt2;
    std::vector<std::string> allowed_operators;
  };
  const auto options = std::make_shared<Options>();
  command
      .add_option("CHECKPOINT", options->checkpoint,
                  "Checkpoint or directory of checkpoints, safetensors file, or Hugging Face directory")
      ->required();
  command
      .add_option("-o,--output", options->output,
                  "File to write the weights to, under the names of the model's state_dict")
      ->option_text("FILE.safetensors");
  auto* const pt2 =
      command
          .add_option("--pt2", options->pt2,
                      "File to write a copy of the exported model with the weights to, for torch.export.load")
          ->option_text("FILE.pt2");
  command
      .add_option("--model", options->model, "Exported model to copy for --pt2 (default: the model that was trained)")
      ->option_text("MODEL.pt2")
      ->needs(pt2);
  add_allowed_operators(command, options->allowed_operators);
  on_call(command, [options] {
    if (options->output.empty() && options->pt2.empty()) {
      throw std::runtime_error("there is nothing to write.\n  Hint: -o model.safetensors, --pt2 trained.pt2, or both.");
    }
    if (fs::path(options->output).extension() == ".pt2") {
      throw std::runtime_error(options->output + ": --output writes safetensors.\n  Hint: --pt2 " + options->output +
                               " writes an exported model.");
    }
    if (!options->output.empty() && !options->pt2.empty() &&
        fs::absolute(options->output).lexically_normal() == fs::absolute(options->pt2).lexically_normal()) {
      throw std::runtime_error(options->output + ": is named by --output and by --pt2.\n  Hint: write two files.");
    }
    for (const std::string& path : {options->output, options->pt2}) {
      if (!path.empty()) require_writable_path(path);
    }
    const WeightFiles weights = read_weight_files(options->checkpoint);
    // Everything is read and compared before the first file is written.
    std::optional<Program> program;
    if (!options->pt2.empty()) {
      const std::string model = options->model.empty() ? model_of(weights) : options->model;
      require_other_file(options->pt2, model);
      program.emplace(model, ProgramOptions{.allowed_operators = options->allowed_operators});
      program->load_state_dict({weights.tensors.begin(), weights.tensors.end()}, weights.path);
    }
    if (!options->output.empty()) {
      const NamedTensors state = state_dict_of(weights);
      // transformers requires this metadata.
      write_safetensors(options->output, state, {{"format", "pt"}});
      std::cout << options->output << ": " << state.size() << (state.size() == 1 ? " tensor" : " tensors") << " of "
                << weights.path << "\n";
    }
    if (program) {
      program->save(options->pt2);
      std::cout << options->pt2 << ": " << program->name() << " with the weights of " << weights.path << "\n";
    }
  });
}

}  // namespace penstock::internal::cli
