// Options of `penstock train`, from the command line or a configuration file.
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

namespace penstock::internal::cli {

// The functions are in options.cc and, for configuration files, in configuration.cc.
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
  // Memory of each rank, a size with a unit; empty for no limit.
  std::string memory;
  bool dry_run = false;
  // 0 stands for about twenty lines in all.
  std::int64_t log_every = 0;
  WeightsOption weights;
  InitialValueOptions initial_values;
  std::string output = "penstock-train";
  std::string config;

  void add_to(CLI::App& command);
  // Throws std::runtime_error for options that contradict each other, such as --layers for an exported model.
  void require_consistent(const CLI::App& command) const;
  // Sets the options that the file of --config has and the command line has not. Relative paths of inputs are relative
  // to the file. Throws std::runtime_error, which names the file.
  void read_config(CLI::App& command) const;
  // Returns the values of all options that apply to this kind of model, data and optimizer, by name. Paths are
  // absolute.
  nlohmann::json resolved(const CLI::App& command) const;

  // Returns the options that must be equal on all ranks; `configuration` is the result of resolved(). Paths may differ
  // between hosts, so only their presence is compared, and of devices their type.
  RankOptions shared_by_ranks(const nlohmann::json& configuration, const DeviceList& devices) const;

  bool is_gpt() const { return cut.model.empty(); }
  // Returns the dtype of --dtype; none for float32.
  std::optional<at::ScalarType> autocast() const;
  // Returns the number of ranks to use: --ranks, 0 if the stages decide, or the default.
  int ranks_wanted() const;

 private:
  // Returns false for the name of an option that this kind of model, data or optimizer does not have.
  bool applies(const std::string& name) const;
};

}  // namespace penstock::internal::cli
