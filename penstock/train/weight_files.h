// Weights that other runs and other programs have written, for a model to start from:
//
//   - a checkpoint of penstock, or a directory of them, of which the last is read
//   - a safetensors file
//   - a Hugging Face directory: model.safetensors, or model.safetensors.index.json and the shards that it names
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "penstock/train/checkpoint.h"

namespace penstock::internal {

// The message names the file, what is wrong with it, and what would be right.
class WeightsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct WeightFiles {
  // The file or directory that was read: of a directory of checkpoints, the last checkpoint.
  std::string path;
  // By the model's own names. They share the mapping of the files.
  std::map<std::string, at::Tensor> tensors = {};
  // None unless a checkpoint was read.
  std::optional<CheckpointInfo> checkpoint = std::nullopt;
};

// Throws WeightsError, or CheckpointError for a damaged checkpoint.
WeightFiles read_weight_files(const std::string& path);

// Returns a checksum of the names and the bytes of all tensors, which it reads.
std::uint32_t checksum_of(const WeightFiles& weights);

}  // namespace penstock::internal
