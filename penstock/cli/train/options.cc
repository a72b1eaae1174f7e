#include "penstock/cli/train/options.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "penstock/cli/checks.h"
#include "penstock/cli/output.h"
#include "penstock/cli/read_number.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/json.h"
#include "penstock/base/nearest.h"

namespace penstock::cli {
namespace {

using nlohmann::json;

// Options of the GPT and its data, and options of exported models, by name.
constexpr std::array kGptOptions{"digits", "rows", "length", "layers", "width", "heads", "dropout"};
constexpr std::array kProgramOptions{"loss", "ignore-index", "at", "shuffle"};
// Paths that are read, and paths that are written.
constexpr std::array kInputPaths{"model", "data", "csv", "weights"};
constexpr std::array kOutputPaths{"checkpoint", "output"};
// Options of one start of a run, rather than of the run.
constexpr std::array kNotOfTheRun{"help",    "config",    "resume",       "overwrite",
                                  "dry-run", "log-every", "memory-limit", "time-limit"};

bool is_one_of(const auto& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

// A value of a configuration file, as the command line has it.
std::string word_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

std::vector<CLI::ConfigItem> read_items(const std::string& path) {
  const std::string text = read_file(path);
  std::vector<CLI::ConfigItem> items;
  if (std::filesystem::path(path).extension() == ".json") {
    const json parsed = [&] {
      try {
        return parse_json(text);
      } catch (const JsonError& error) {
        throw std::runtime_error(path + ": " + error.what());
      }
    }();
    if (!parsed.is_object()) throw std::runtime_error(path + ": is not a JSON object: {\"steps\": 1000, …}.");
    for (const auto& [name, value] : parsed.items()) {
      CLI::ConfigItem item;
      item.name = name;
      if (value.is_array()) {
        for (const json& one : value) item.inputs.push_back(word_of(one));
      } else if (!value.is_null()) {
        item.inputs.push_back(word_of(value));
      }
      items.push_back(std::move(item));
    }
    return items;
  }
  std::istringstream in(text);
  return CLI::ConfigTOML().from_config(in);
}

// Returns the number that a word of the command line is, or the word. One number is one value however it is written: .50
// and 0.5, 1e3 and 1000.
json number_or_word(const std::string& word) {
  if (const auto number = read_number<std::int64_t>(word)) return *number;
  if (const auto number = read_number<std::uint64_t>(word)) return *number;
  const std::optional<double> number = read_number<double>(word);
  if (!number || !std::isfinite(*number)) return word;
  constexpr double kExact = 1LL << 53;
  if (*number == std::trunc(*number) && std::abs(*number) < kExact) return static_cast<std::int64_t>(*number);
  return *number;
}

// Numbers, truth values and lists as such.
json value_of(const CLI::Option& option, bool is_path) {
  const std::vector<std::string> words = option.count() > 0 ? option.results() : std::vector{option.get_default_str()};
  // A flag, which may be on by default.
  if (option.get_expected_max() == 0) return option.count() > 0 ? option.as<bool>() : words.front() == "true";
  const auto one = [&](const std::string& word) { return is_path ? json(word) : number_or_word(word); };
  if (option.get_expected_max() == 1) return words.empty() ? json() : one(words.front());
  json list = json::array();
  for (const std::string& word : words) {
    if (!word.empty() && word != "[]") list.push_back(one(word));
  }
  return list;
}

}  // namespace

void TrainOptions::add_to(CLI::App& command) {
  cut.add_to(command, /*required=*/false);
  run.ranks = 0;
  run.add_to(command);
  command.get_option("--ranks")->description(
      "Number of ranks (default: 2, or as many as the schedule needs for the stages)");
  command.get_option("--microbatches")->description("Number of microbatches (default: four for each rank)");

  command
      .add_option(
          "--data", data,
          "Text to train on, a file or a directory; for MODEL.pt2, a directory of batches (default: sums, generated)")
      ->option_text("PATH");
  command.add_option("--loss", loss, "Loss of MODEL.pt2: its output, or its output compared with the batch's target")
      ->option_text("output|mse|cross_entropy [output]")
      ->check(one_of({"output", "mse", "cross_entropy"}));
  command
      .add_option("--ignore-index", ignore_index,
                  "Target class that cross_entropy leaves out of the loss and of its mean")
      ->option_text("N [-100]");
  command
      .add_flag("--shuffle,!--no-shuffle", shuffle,
                "Shuffle the batches of MODEL.pt2 in each epoch, by --seed; otherwise they come by file name")
      ->default_str("true");
  command.add_option("--digits", digits, "Number of digits of the numbers that are added")
      ->option_text("N [3]")
      ->check(whole_number());
  command.add_option("--rows", rows, "Number of rows of a batch")->option_text("N [128]")->check(whole_number());
  command.add_option("--length", length, "Number of bytes of a row of text")
      ->option_text("N [128]")
      ->check(whole_number());

  command.add_option("--layers", gpt.layers, "Number of transformer layers")
      ->option_text("N [4]")
      ->check(whole_number());
  command.add_option("--width", gpt.width, "Width of the layers")->option_text("N [64]")->check(whole_number());
  command.add_option("--heads", gpt.heads, "Number of attention heads")->option_text("N [4]")->check(whole_number());
  command.add_option("--dropout", gpt.dropout, "Dropout probability")->option_text("P [0]")->check(float_number());
  command.add_option("--dtype", dtype, "Data type of matrix products (autocast); parameters are float32")
      ->option_text("float32|bfloat16 [float32]")
      ->check(one_of({"float32", "bfloat16"}));

  command.add_option("--steps", steps, "Number of optimizer steps")->option_text("N [1600]")->check(whole_number());
  command.add_option("--optimizer", optimizer.name, "Optimizer")
      ->option_text("sgd|adam|adamw [adamw]")
      ->check(one_of({"sgd", "adam", "adamw"}));
  command.add_option("--learning-rate", learning_rate.rate, "Learning rate after the warm-up")
      ->option_text("R [0.004]")
      ->check(float_number());
  command.add_option("--lr-schedule", learning_rate.schedule, "Decay of the learning rate after the warm-up")
      ->option_text("constant|linear|cosine [cosine]")
      ->check(one_of({"constant", "linear", "cosine"}));
  command.add_option("--warmup", learning_rate.warmup, "Number of warm-up steps")->option_text("N [50]");
  command.add_option("--min-lr", learning_rate.minimum, "Learning rate of the last step, with linear and cosine decay")
      ->option_text("R [a twentieth of --learning-rate]")
      ->check(float_number());
  command.add_option("--momentum", optimizer.momentum, "Momentum of sgd")
      ->option_text("M [0.9]")
      ->check(float_number());
  command.add_option("--beta1", optimizer.beta1, "Decay rate of the mean of gradients, for adam and adamw")
      ->option_text("B [0.9]")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--beta2", optimizer.beta2, "Decay rate of the mean of squared gradients, for adam and adamw")
      ->option_text("B [0.98]")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--weight-decay", optimizer.weight_decay, "Weight decay")
      ->option_text("D [0.01]")
      ->check(float_number());
  command.add_option("--clip", clip, "Largest norm of all gradients, to which they are clipped (0: no clipping)")
      ->option_text("N [1]")
      ->check(float_number());
  command
      .add_option("--on-nonfinite", on_nonfinite,
                  "Stop at a loss or gradient norm that is NaN or infinite, or skip the step")
      ->option_text("stop|skip [stop]")
      ->check(one_of({"stop", "skip"}));
  command.add_option("--max-skipped", max_skipped, "Number of consecutive steps that may be skipped")
      ->option_text("N [10]")
      ->check(whole_number());
  command.add_option("--accumulate", accumulate, "Number of batches whose gradients a step accumulates")
      ->option_text("N [1]")
      ->check(whole_number());
  command.add_option("--data-parallel", data_parallel, "Number of data-parallel replicas of the pipeline")
      ->option_text("D [1]")
      ->check(whole_number());
  command.add_flag("--shard", shard, "Shard parameters and optimizer state over the replicas");

  weights.add_to(command, "Initial weights; a checkpoint that is resumed takes precedence");
  command.add_option("--eval-every", eval_every, "Number of steps between evaluations (0: only at the end)")
      ->option_text("N [0]");
  command.add_option("--checkpoint", checkpoint, "Directory for checkpoints")->option_text("DIR")->check(path());
  command
      .add_option("--checkpoint-every", checkpoint_every, "Number of steps between checkpoints (0: only at the end)")
      ->option_text("N [0]");
  command.add_option("--keep", keep, "Number of checkpoints to keep")->option_text("K [3]")->check(whole_number());
  command.add_flag("--resume", resume, "Resume from the newest checkpoint, or begin if there is none");
  command.add_flag("--overwrite", overwrite, "Remove the checkpoints and metrics of an earlier run, and begin anew");
  command.add_flag("--dry-run", dry_run,
                   "Check all inputs and outputs, estimate memory and time with two trial steps, and stop");
  command
      .add_option("--log-every", log_every,
                  "Number of steps between lines of progress (default: about twenty lines in all)")
      ->option_text("N");
  command.add_option("--output", output, "Run directory: metrics, configuration and timeline")
      ->option_text("DIR [penstock-train]")
      ->check(path());
  command
      .add_option("--config", config,
                  "File with these options by name, TOML or JSON; the command line takes precedence")
      ->option_text("FILE");
  for (CLI::Option* option : command.get_options()) option->capture_default_str();
}

void TrainOptions::require_fit(const CLI::App& command) const {
  if (resume && overwrite) {
    throw std::runtime_error("--resume continues an earlier run, and --overwrite removes it; give one of them.");
  }
  if (resume && checkpoint.empty()) {
    throw std::runtime_error(
        "--resume continues from the checkpoints of --checkpoint DIR, which is missing.\n  Hint: add --checkpoint "
        "DIR.");
  }
  if (learning_rate.minimum && *learning_rate.minimum > learning_rate.rate) {
    throw std::runtime_error("--min-lr is " + command.get_option("--min-lr")->as<std::string>() +
                             ", more than --learning-rate, " +
                             command.get_option("--learning-rate")->as<std::string>() + ", which it is the end of.");
  }
  const auto given = [&](const char* name) { return command.get_option(std::string("--") + name)->count() > 0; };
  for (const char* name : kGptOptions) {
    if (is_gpt() || !given(name)) continue;
    throw std::runtime_error("--" + std::string(name) + " is of the GPT that is trained without MODEL.pt2; given is " +
                             cut.model + ".");
  }
  for (const char* name : kProgramOptions) {
    if (!is_gpt() || !given(name)) continue;
    throw std::runtime_error("--" + std::string(name) + " is for an exported model, and MODEL.pt2 is not given.");
  }
}

bool TrainOptions::applies(const std::string& name) const {
  if (is_one_of(kGptOptions, name) && !is_gpt()) return false;
  if (is_one_of(kProgramOptions, name) && is_gpt()) return false;
  if (name == "digits") return data.empty();
  if (name == "length") return !data.empty();
  if (name == "momentum") return optimizer.name == "sgd";
  if (name == "beta1" || name == "beta2") return optimizer.name != "sgd";
  return true;
}

void TrainOptions::read_config(CLI::App& command) const {
  if (config.empty()) return;
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back(name);
  }
  for (const CLI::ConfigItem& item : read_items(config)) {
    // Marks of sections, which CLI11 gives too.
    if (item.name == "++" || item.name == "--") continue;
    CLI::Option* const option = command.get_option_no_throw(item.name == "model" ? "MODEL.pt2" : "--" + item.name);
    if (option == nullptr || item.name == "config" || item.name == "help") {
      const auto near = nearest(item.name, names);
      throw std::runtime_error(config + ": there is no option '" + item.name + "'." +
                               (near ? "\n  Hint: did you mean " + *near + "?" : ""));
    }
    if (option->count() > 0) continue;
    std::vector<std::string> inputs = item.inputs;
    if (is_one_of(kInputPaths, item.name)) {
      for (std::string& path : inputs) path = (std::filesystem::path(config).parent_path() / path).string();
    }
    try {
      // A flag may be told by its negative name.
      if (option->get_expected_max() == 0 && !inputs.empty()) {
        inputs.front() = option->get_flag_value(item.name, inputs.front());
      }
      option->add_result(inputs);
      option->run_callback();
    } catch (const CLI::Error& error) {
      throw std::runtime_error(config + ": " + error.what());
    }
  }
}

json TrainOptions::resolved(const CLI::App& command) const {
  json all = json::object();
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_lnames().empty() ? "model" : option->get_lnames().front();
    if (is_one_of(kNotOfTheRun, name) || !applies(name)) continue;
    // An option that was not given and has no default, or that is off by default. The seed is what it is.
    const std::string otherwise = option->get_default_str();
    const bool is_off = otherwise.empty() || otherwise == "0" || otherwise == "[]" || otherwise == "false";
    if (option->count() == 0 && is_off && name != "seed") continue;
    const bool is_path = is_one_of(kInputPaths, name) || is_one_of(kOutputPaths, name);
    all[name] = value_of(*option, is_path);
    if (is_path) all[name] = std::filesystem::absolute(all[name].get<std::string>()).lexically_normal().string();
  }
  return all;
}

RankOptions TrainOptions::shared_by_ranks(const json& configuration) const {
  // Options of the coordinator alone, or of each process for itself, and options whose defaults depend on the model:
  // those are compared once they are resolved.
  constexpr std::array kOwn{"output", "keep", "timeout", "ranks", "microbatches"};
  RankOptions shared;
  for (const auto& [name, value] : configuration.items()) {
    if (is_one_of(kOwn, name)) continue;
    const bool is_path = is_one_of(kInputPaths, name) || is_one_of(kOutputPaths, name);
    shared[name] = is_path ? "given" : word_of(value);
  }
  if (resume) shared["resume"] = "given";
  if (dry_run) shared["dry-run"] = "given";
  return shared;
}

int TrainOptions::ranks_wanted() const {
  if (run.ranks > 0 || !run.csv.empty()) return run.ranks;
  constexpr int kDefault = 2;
  return cut.stages == 0 && cut.at.empty() ? kDefault : 0;
}

TrainSetup set_up(const TrainOptions& options, int replicas) {
  TrainSetup setup;
  RunOptions run = options.run;
  run.ranks = options.ranks_wanted();
  const std::uint64_t seed = run.seed;
  const bool bfloat16 = options.dtype == "bfloat16";
  const std::optional<WeightFiles> weights = options.weights.read();
  int stages = 0;
  if (options.is_gpt()) {
    GptOptions gpt = options.gpt;
    gpt.bfloat16 = bfloat16;
    if (options.data.empty()) {
      auto sums = std::make_unique<AdditionData>(options.digits, options.rows, seed);
      gpt.length = sums->length();
      setup.data = std::move(sums);
    } else {
      gpt.length = options.length;
      setup.data = std::make_unique<TextData>(options.data, options.length, options.rows, seed);
    }
    stages = options.cut.stages > 0 ? options.cut.stages : run.stages_wanted();
    if (!options.cut.at.empty()) throw std::runtime_error("--at is for MODEL.pt2; a GPT is cut by --stages.");
    for (int i = 0; i < replicas; ++i) setup.replicas.push_back(gpt_model(gpt, seed, stages, weights));
  } else {
    if (options.data.empty()) {
      throw std::runtime_error("what is " + options.cut.model +
                               " trained on?\n  Hint: --data FOLDER has batches in "
                               "safetensors files: args.0, kwargs.mask, target.");
    }
    for (int i = 0; i < replicas; ++i) {
      Program program = read_program(options.cut, weights);
      program.train();
      if (bfloat16) program.set_autocast(at::kBFloat16);
      if (i == 0) setup.program = program;
      Pipe pipe = options.cut.cut(program, run.stages_wanted());
      stages = pipe.num_stages();
      setup.replicas.push_back(program_model(std::move(pipe)));
    }
    setup.data = batch_files(
        options.data, *setup.program,
        {.loss = options.loss, .ignore_index = options.ignore_index, .seed = seed, .shuffle = options.shuffle});
  }
  constexpr int kMicrobatchesARank = 4;
  const Schedule probe = run.make(stages, /*rows=*/0);
  setup.schedule =
      run.microbatches > 0 || !run.csv.empty() ? probe : run.make(stages, kMicrobatchesARank * probe.ranks());
  return setup;
}

}  // namespace penstock::cli
