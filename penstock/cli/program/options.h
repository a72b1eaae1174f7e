// Options that the commands on exported models share: how to cut a model, and how to run it.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/cli/device_transport.h"
#include "penstock/cli/devices.h"
#include "penstock/cli/limits.h"
#include "penstock/program/pipe.h"
#include "penstock/program/program.h"
#include "penstock/schedule/schedule.h"
#include "penstock/transport/rank_options.h"
#include "penstock/transport/transport.h"

namespace penstock::internal::cli {

// Adds --allow-operator.
void add_allowed_operators(CLI::App& command, std::vector<std::string>& names);

// Options that say where to cut a model into stages.
struct CutOptions {
  std::string model;
  std::vector<std::string> at;
  int stages = 0;
  std::vector<std::string> allowed_operators;
  LimitOptions limits;

  void add_to(CLI::App& command, bool required = true);
  // Cuts the model into --stages stages, or at the modules of --at and the model's pipe_split() marks. Without options
  // and marks it cuts into `default_stages`.
  Pipe cut(const Program& program, int default_stages = 1) const;
  ProgramOptions program() const { return {.allowed_operators = allowed_operators}; }
};

// Initial values of a model that was exported on the meta device.
struct InitialValueOptions {
  // Standard deviation for weights of modules that are not PyTorch's own.
  std::optional<double> deviation;

  void add_to(CLI::App& command);
  // Initialises weights that have no values from the seed.
  void apply(Program& program, std::uint64_t seed) const;
};

// Options that say how to run a pipeline.
struct RunOptions {
  int ranks = 0;
  std::string schedule = "1F1B";
  std::string csv;
  int microbatches = 0;
  // Parts whose activations are computed again in the backward: "none", "stages", "all" repeated modules, or modules.
  std::vector<std::string> recompute = {"none"};
  std::string transport = "threads";
  int threads = 1;
  std::uint64_t seed = 0;
  double timeout = 300;
  DeviceOption device;
  DeviceTransportOption device_transport;

  // Without backwards there is no --recompute.
  void add_to(CLI::App& command, bool has_backward = true);
  // Throws std::runtime_error for options that contradict each other.
  void require_valid() const;
  std::chrono::milliseconds timeout_in_milliseconds() const;
  // Loads and returns the devices of --device. Throws DeviceError, also if they do not fit to --device-transport.
  // `are_launched` is true if the ranks are the processes of a launcher.
  DeviceList load_devices(bool are_launched = false) const;
  // Connects this process rank to the others. Options that they have to agree on are in `agreed`. Throws
  // RendezvousError and TransportError.
  std::unique_ptr<Transport> connect(const DeviceList& devices, RankOptions agreed = {}) const;
  // Returns the number of stages that --ranks or --csv ask for, and 1 without them.
  int stages_wanted() const;
  // Returns the schedule for this number of stages. `available` is the number of microbatches that the inputs can be
  // split into, or 0 if any number will do. Throws ProgramError if schedule, stages and ranks do not fit together.
  Schedule make(int stages, int available) const;
  // True if --recompute is this word alone.
  bool recomputes(std::string_view word) const { return recompute.size() == 1 && recompute.front() == word; }
  // Selects the modules of --recompute. Throws ProgramError if there is no such module.
  void recompute_modules(Program& program) const;

 private:
  Schedule make_without_recomputation(int stages, int available) const;
};

}  // namespace penstock::internal::cli
