// What `penstock train` can be told, on its line or in a file.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "penstock/cli/program/model_files.h"
#include "penstock/cli/program/options.h"
#include "penstock/train/data.h"
#include "penstock/train/loop.h"
#include "penstock/train/model.h"
#include "penstock/train/trainer.h"
#include "penstock/transport/rank_options.h"

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

  std::int64_t steps = 1600;
  OptimizerOptions optimizer;
  LearningRate learning_rate;
  int accumulate = 1;
  double clip = 1;
  std::string on_nonfinite = "stop";
  int max_skipped = 10;
  bool shuffle = true;
  int data_parallel = 1;
  bool shard = false;

  std::int64_t eval_every = 0;
  std::string checkpoint;
  std::int64_t checkpoint_every = 0;
  int keep = 3;
  bool resume = false;
  bool overwrite = false;
  bool dry_run = false;
  // 0: about twenty lines.
  std::int64_t log_every = 0;
  WeightsOption weights;
  std::string output = "penstock-train";
  std::string config;

  void add_to(CLI::App& command);
  // Throws std::runtime_error for options that do not go together, such as one that makes a GPT where a model is given.
  void require_fit(const CLI::App& command) const;
  // Takes up what the file says and the command line does not; relative paths of inputs are relative to the file. Throws
  // std::runtime_error, which names the file.
  void read_config(CLI::App& command) const;
  // Returns the options of this kind of model, data and optimizer by name, with their values; paths are absolute.
  nlohmann::json resolved(const CLI::App& command) const;

  // Returns the options that all ranks of a run must have in common; `configuration` is what resolved() gives. Paths may
  // differ between hosts, so what counts is that they are given.
  RankOptions shared_by_ranks(const nlohmann::json& configuration) const;

  bool is_gpt() const { return cut.model.empty(); }
  // Of ranks, and without them the stages of a GPT.
  int ranks_wanted() const;

 private:
  // Returns false for an option, by name, that this kind of model, data or optimizer does not have.
  bool applies(const std::string& name) const;
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
