// Reads exported models, weights and inputs for the commands on exported models.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>

#include "penstock/cli/program/options.h"
#include "penstock/program/inputs.h"
#include "penstock/program/program.h"
#include "penstock/train/weight_files.h"

namespace penstock::internal::cli {

// --weights: weights to use instead of the model's own.
struct WeightsOption {
  std::string path;

  void add_to(CLI::App& command, const std::string& description);
  // Returns nullopt if the option is not given. Throws WeightsError.
  std::optional<WeightFiles> read() const;
};

// Reads an exported model, and loads the weights if they are given. Throws ProgramError, which lists the differences,
// if they do not fit the model.
Program read_program(const CutOptions& cut, const std::optional<WeightFiles>& weights = std::nullopt);

// Reads the inputs of all microbatches, args.0, kwargs.mask, …. A target, which files for training have, is left out.
TensorsByName read_inputs(const std::string& path);
// Returns the number of rows of a batch.
std::int64_t rows_in(const TensorsByName& batch);

}  // namespace penstock::internal::cli
