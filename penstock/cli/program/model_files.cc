#include "penstock/cli/program/model_files.h"

#include <algorithm>

#include "penstock/tensor/safetensors.h"

namespace penstock::internal::cli {

void WeightsOption::add_to(CLI::App& command, const std::string& description) {
  command
      .add_option("--weights", path,
                  description + ": checkpoint or directory of checkpoints, safetensors file, or Hugging Face directory")
      ->option_text("PATH");
}

std::optional<WeightFiles> WeightsOption::read() const {
  return path.empty() ? std::nullopt : std::optional(read_weight_files(path));
}

Program read_program(const CutOptions& cut, const std::optional<WeightFiles>& weights) {
  cut.limits.apply();
  Program program(cut.model, cut.program());
  if (weights) {
    // The tensors are mapped from files.
    program.load_state_dict({weights->tensors.begin(), weights->tensors.end()}, weights->path,
                            Program::CopyWhen::WhenUsed);
  }
  return program;
}

TensorsByName read_inputs(const std::string& path) {
  const NamedTensors read = read_safetensors(path);
  TensorsByName batch(read.begin(), read.end());
  batch.erase("target");
  return batch;
}

std::int64_t rows_in(const TensorsByName& batch) {
  std::int64_t rows = 0;
  for (const auto& [name, tensor] : batch) rows = std::max(rows, tensor.dim() > 0 ? tensor.size(0) : 1);
  return rows;
}

}  // namespace penstock::internal::cli
