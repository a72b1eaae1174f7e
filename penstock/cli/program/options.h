// What the commands on exported models have in common: CUT and RUN.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "penstock/cli/limits.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/schedule/schedule.h"

namespace penstock::cli {

// Adds --allow-operator.
void add_allowed_operators(CLI::App& command, std::vector<std::string>& names);

// CUT: where to cut a model.
struct CutOptions {
  std::string model;
  std::vector<std::string> at;
  int stages = 0;
  std::vector<std::string> allowed_operators;
  LimitOptions limits;

  void add_to(CLI::App& command, bool required = true);
  // At the places that were named and the model's own marks; in so many stages; without a word, at the marks, or in
  // `otherwise` stages if there are none.
  Pipe cut(const Program& program, int otherwise = 1) const;
  ProgramOptions program() const { return {.allowed_operators = allowed_operators}; }
};

// RUN: how to run it.
struct RunOptions {
  int ranks = 0;
  std::string schedule = "1F1B";
  std::string csv;
  int microbatches = 0;
  std::string transport = "threads";
  int threads = 1;
  std::uint64_t seed = 0;
  double timeout = 300;

  void add_to(CLI::App& command);
  std::chrono::milliseconds timeout_in_milliseconds() const;
  // How many stages these ranks have, if they were named and nothing else says.
  int stages_wanted() const;
  // The schedule for so many stages. `rows` is how many microbatches the inputs are, or 0 for any number.
  Schedule make(int stages, int rows) const;
};

}  // namespace penstock::cli
