// What `penstock train` can be told, on its line or in a file.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "penstock/cli/program/options.h"
#include "penstock/train/data.h"
#include "penstock/train/loop.h"
#include "penstock/train/model.h"
#include "penstock/train/trainer.h"

namespace penstock::cli {

struct TrainOptions {
  CutOptions cut;
  RunOptions run;

  std::string data;
  std::string loss = "output";
  std::int64_t ignore_index = -100;
  int digits = 3;
  int rows = 128;
  int length = 128;

  GptOptions gpt;
  std::string dtype = "float32";

  std::int64_t steps = 1200;
  OptimizerOptions optimizer;
  LearningRate learning_rate;
  int accumulate = 1;
  double clip = 1;
  std::string on_nonfinite = "stop";
  int max_skipped = 10;
  int data_parallel = 1;
  bool shard = false;

  std::int64_t eval_every = 0;
  std::string checkpoint;
  std::int64_t checkpoint_every = 0;
  int keep = 3;
  bool resume = false;
  std::string output = "penstock-train";
  std::string config;

  void add_to(CLI::App& command);
  // Throws std::runtime_error for an option on the line that makes a GPT or its data, where a model is given.
  void require_fit(const CLI::App& command) const;
  // Takes up what the file says and the line does not. Throws std::runtime_error, which names the file.
  void read_config(CLI::App& command) const;
  // Every option with what it is now, by its name.
  static nlohmann::json resolved(const CLI::App& command);

  bool is_gpt() const { return cut.model.empty(); }
  // Of ranks, and without them the stages of a GPT.
  int ranks_wanted() const;
};

// All that a run is made of.
struct TrainSetup {
  // One for each replica of this process.
  std::vector<std::unique_ptr<Model>> replicas;
  // Of the data's own model, where it needs one.
  std::optional<Program> program;
  std::unique_ptr<Data> data;
  std::optional<Schedule> schedule;
};
TrainSetup set_up(const TrainOptions& options, int replicas);

}  // namespace penstock::cli
