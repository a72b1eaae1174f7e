// The files that the commands on exported models read besides the model: weights, and inputs.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "penstock/cli/program/options.h"
#include "penstock/program/inputs.h"
#include "penstock/program/program.h"
#include "penstock/train/weight_files.h"

namespace penstock::cli {

// --weights: the weights to use instead of the model's own.
struct WeightsOption {
  std::string path;

  void add_to(CLI::App& command, const std::string& description);
  // Throws WeightsError. None if the option is not given.
  std::optional<WeightFiles> read() const;
};

// Reads an exported model, and loads the weights if there are any. Throws ProgramError, with what differs, unless they fit.
Program read_program(const CutOptions& cut, const std::optional<WeightFiles>& weights = std::nullopt);

// Reads the inputs of all microbatches, args.0, kwargs.mask, …, from a file that may have been written for training: without
// its target.
TensorsByName read_inputs(const std::string& path);
// Returns how many rows a batch has.
std::int64_t rows_in(const TensorsByName& batch);

}  // namespace penstock::cli
