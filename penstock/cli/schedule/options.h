// Options that subcommands of `penstock schedule` share: which schedule is meant, and what its actions cost.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"

namespace penstock::cli {

// A schedule by its name and size, or from a file.
struct ScheduleOptions {
  std::string name;
  std::string csv;
  int ranks = 0;
  int stages_per_rank = 0;
  int microbatches = 0;
  std::vector<std::string> edges;
  std::vector<std::string> shared;

  void add_to(CLI::App& command);
  // Adds --ranks and --microbatches alone.
  void add_size_to(CLI::App& command);

  std::string title() const;
  // Throws ScheduleError when an option is missing or cannot be read, and std::runtime_error when the file cannot.
  Schedule schedule() const;
  // Throws ScheduleError when the number of ranks or microbatches is missing.
  void require_size() const;
};

// Costs for the simulator, from options and from a file.
struct CostOptions {
  Costs costs;
  std::string file;

  // `of` names what the time of a forward is that of.
  void add_to(CLI::App& command, const std::string& of);
  // Returns the costs of `entries` stages or, for `compare`, of as many ranks' shares of the model.
  Costs get(int entries, int ranks) const;
};

}  // namespace penstock::cli
