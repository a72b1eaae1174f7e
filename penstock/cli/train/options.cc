#include "penstock/cli/train/options.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>

#include "penstock/cli/checks.h"

namespace penstock::internal::cli {
namespace {

// Names of the options that only a GPT and its data have, and of those that only exported models have.
constexpr std::array kGptOptions{"digits", "rows", "length", "layers", "width", "heads", "dropout"};
constexpr std::array kProgramOptions{"loss", "ignore-index", "at", "shuffle", "init-std"};

bool contains(const auto& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

void TrainOptions::add_to(CLI::App& command) {
  cut.add_to(command, /*required=*/false);
  run.ranks = 0;
  run.add_to(command);
  command.get_option("--ranks")->description(
      "Number of ranks of each replica (default: 2, or as many as the schedule needs for the stages)");
  command.get_option("--microbatches")->description("Number of microbatches (default: four for each rank)");

  command
      .add_option("--data", data,
                  "Text file or directory of text files; for MODEL.pt2, directory of safetensors batches (default: "
                  "generated sums)")
      ->option_text("PATH");
  command
      .add_option("--loss", loss,
                  "Loss of MODEL.pt2: its output itself, or mse or cross_entropy of its output and the batch's target")
      ->option_text("output|mse|cross_entropy [output]")
      ->check(one_of({"output", "mse", "cross_entropy"}));
  command.add_option("--ignore-index", ignore_index, "Target class that cross_entropy ignores")
      ->option_text("N [-100]");
  command
      .add_flag("--shuffle,!--no-shuffle", shuffle,
                "Shuffle the batches of MODEL.pt2 in each epoch, by --seed (default), or take them in the order of "
                "file names")
      ->default_str("true");
  command.add_option("--digits", digits, "Number of digits of the summands in generated sums")
      ->option_text("N [3]")
      ->check(whole_number());
  command.add_option("--rows", rows, "Number of rows of a batch")->option_text("N [128]")->check(whole_number());
  command.add_option("--length", length, "Sequence length of text, in bytes")
      ->option_text("N [128]")
      ->check(whole_number());

  command.add_option("--layers", gpt.layers, "Number of transformer layers")
      ->option_text("N [4]")
      ->check(whole_number());
  command.add_option("--width", gpt.width, "Width of the transformer layers (embedding dimension)")
      ->option_text("N [64]")
      ->check(whole_number());
  command.add_option("--heads", gpt.heads, "Number of attention heads")->option_text("N [4]")->check(whole_number());
  command.add_option("--dropout", gpt.dropout, "Dropout probability")->option_text("P [0]")->check(float_number());
  command
      .add_option("--dtype", dtype,
                  "Data type of matrix products, by autocast; parameters stay float32. float16 scales the loss")
      ->option_text("float32|bfloat16|float16 [float32]")
      ->check(one_of({"float32", "bfloat16", "float16"}));

  command.add_option("--steps", steps, "Number of optimizer steps")->option_text("N [1600]")->check(whole_number());
  command.add_option("--optimizer", optimizer.name, "Optimizer algorithm")
      ->option_text("sgd|adam|adamw [adamw]")
      ->check(one_of({"sgd", "adam", "adamw"}));
  command.add_option("--learning-rate", learning_rate.rate, "Peak learning rate, after the warm-up")
      ->option_text("R [0.004]")
      ->check(float_number());
  command.add_option("--lr-schedule", learning_rate.schedule, "Decay of the learning rate after the warm-up")
      ->option_text("constant|linear|cosine [cosine]")
      ->check(one_of({"constant", "linear", "cosine"}));
  command.add_option("--warmup", learning_rate.warmup, "Number of warm-up steps")->option_text("N [50]");
  command.add_option("--min-lr", learning_rate.minimum, "Learning rate at the end of linear and cosine decay")
      ->option_text("R [a twentieth of --learning-rate]")
      ->check(float_number());
  command.add_option("--momentum", optimizer.momentum, "Momentum, for sgd")
      ->option_text("M [0.9]")
      ->check(float_number());
  command.add_option("--beta1", optimizer.beta1, "Decay rate of the first moment, for adam and adamw")
      ->option_text("B [0.9]")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--beta2", optimizer.beta2, "Decay rate of the second moment, for adam and adamw")
      ->option_text("B [0.98]")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--weight-decay", optimizer.weight_decay, "Weight decay coefficient")
      ->option_text("D [0.01]")
      ->check(float_number());
  command
      .add_option("--clip", clip, "Maximum total norm of the gradients, above which they are clipped (0: no clipping)")
      ->option_text("N [1]")
      ->check(float_number());
  command
      .add_option("--on-nonfinite", on_nonfinite,
                  "What to do when a loss or gradient norm is NaN or infinite: stop the run, or skip the step")
      ->option_text("stop|skip [stop]")
      ->check(one_of({"stop", "skip"}));
  command.add_option("--max-skipped", max_skipped, "Number of consecutive steps that --on-nonfinite skip may skip")
      ->option_text("N [10]")
      ->check(whole_number());
  command.add_option("--accumulate", accumulate, "Number of batches whose gradients each step accumulates")
      ->option_text("N [1]")
      ->check(whole_number());
  command.add_option("--data-parallel", data_parallel, "Number of data-parallel replicas of the pipeline")
      ->option_text("D [1]")
      ->check(whole_number());
  command.add_flag("--shard", shard, "Shard parameters and optimizer state over the replicas (ZeRO)");

  weights.add_to(command, "Initial weights, unless a checkpoint is resumed");
  initial_values.add_to(command);
  command.add_option("--eval-every", eval_every, "Steps between evaluations (0: only at the end)")
      ->option_text("N [0]");
  command.add_option("--checkpoint", checkpoint, "Directory to write checkpoints to (default: no checkpoints)")
      ->option_text("DIR")
      ->check(path());
  command.add_option("--checkpoint-every", checkpoint_every, "Steps between checkpoints (0: only at the end)")
      ->option_text("N [0]");
  command.add_option("--keep", keep, "Number of newest checkpoints to keep")
      ->option_text("K [3]")
      ->check(whole_number());
  command.add_flag("--resume", resume, "Resume from the newest checkpoint, or start a new run if there is none");
  command.add_flag("--overwrite", overwrite,
                   "Remove the checkpoints and metrics of an earlier run, and start a new one");
  command
      .add_option("--memory", memory,
                  "Memory of each rank for tensors; a run that would need more is refused before its first step, with "
                  "options under which it would fit")
      ->option_text("SIZE")
      ->check(size_in_bytes());
  command.add_flag("--dry-run", dry_run,
                   "Check all inputs and outputs, estimate memory and time with two trial steps, and exit");
  command.add_option("--log-every", log_every, "Steps between lines of progress (default: about twenty lines in all)")
      ->option_text("N");
  command.add_option("--output", output, "Run directory, for metrics, configuration, timeline and costs")
      ->option_text("DIR [penstock-train]")
      ->check(path());
  command.add_option("--config", config, "TOML or JSON file with options by name; the command line takes precedence")
      ->option_text("FILE");
  for (CLI::Option* option : command.get_options()) option->capture_default_str();
}

void TrainOptions::require_consistent(const CLI::App& command) const {
  if (resume && overwrite) {
    throw std::runtime_error("--resume continues an earlier run, and --overwrite removes it: they exclude each other.");
  }
  if (resume && checkpoint.empty()) {
    throw std::runtime_error("--resume needs the directory of the checkpoints.\n  Hint: add --checkpoint DIR.");
  }
  if (learning_rate.minimum && *learning_rate.minimum > learning_rate.rate) {
    throw std::runtime_error("--min-lr is " + command.get_option("--min-lr")->as<std::string>() +
                             ", above --learning-rate, " + command.get_option("--learning-rate")->as<std::string>() +
                             ", from which the learning rate decays to it.");
  }
  const auto given = [&](const char* name) { return command.get_option(std::string("--") + name)->count() > 0; };
  for (const char* name : kGptOptions) {
    if (is_gpt() || !given(name)) continue;
    throw std::runtime_error("--" + std::string(name) +
                             " is an option of the GPT, which is trained without MODEL.pt2; found " + cut.model + ".");
  }
  for (const char* name : kProgramOptions) {
    if (!is_gpt() || !given(name)) continue;
    throw std::runtime_error("--" + std::string(name) + " is an option of exported models, and MODEL.pt2 is missing.");
  }
}

std::optional<at::ScalarType> TrainOptions::autocast() const {
  if (dtype == "bfloat16") return at::kBFloat16;
  if (dtype == "float16") return at::kHalf;
  return std::nullopt;
}

bool TrainOptions::applies(const std::string& name) const {
  if (contains(kGptOptions, name) && !is_gpt()) return false;
  if (contains(kProgramOptions, name) && is_gpt()) return false;
  if (name == "digits") return data.empty();
  if (name == "length") return !data.empty();
  if (name == "momentum") return optimizer.name == "sgd";
  if (name == "beta1" || name == "beta2") return optimizer.name != "sgd";
  return true;
}

int TrainOptions::ranks_wanted() const {
  if (run.ranks > 0 || !run.csv.empty()) return run.ranks;
  constexpr int kDefault = 2;
  return cut.stages == 0 && cut.at.empty() ? kDefault : 0;
}

}  // namespace penstock::internal::cli
