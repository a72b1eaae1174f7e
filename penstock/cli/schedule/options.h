// Options that subcommands of `penstock schedule` share: the schedule, and the costs of its actions.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"

namespace penstock::internal::cli {

// Options of a schedule: its name and size, or a file.
struct ScheduleOptions {
  std::string name;
  std::string csv;
  int ranks = 0;
  int stages_per_rank = 0;
  int microbatches = 0;
  std::vector<std::string> edges;
  std::vector<std::string> shared;
  // Stages to recompute: "all", or a list of indices; empty for none.
  std::string recompute;

  void add_to(CLI::App& command);
  // Adds only --ranks and --microbatches.
  void add_size_to(CLI::App& command);

  std::string title() const;
  // Generates or reads the schedule. Throws ScheduleError if an option is missing or malformed, and std::runtime_error
  // if the file cannot be read.
  Schedule schedule() const;
  // Throws ScheduleError when the number of ranks or microbatches is missing.
  void require_size() const;

 private:
  Schedule schedule_without_recomputation() const;
};

// Options of the simulator's costs: times, or a file.
struct CostOptions {
  Costs costs;
  std::string file;
  // True for `compare`: the costs of a rank are those of all its stages together.
  bool are_by_rank = false;

  void add_to(CLI::App& command);
  // Returns costs with one entry for each stage or rank.
  Costs get(int entries, int ranks) const;
};

}  // namespace penstock::internal::cli
