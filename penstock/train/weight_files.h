// Initial weights of a model, read from files of other runs and programs:
//
//   - a checkpoint of Penstock, or the last one of a directory of checkpoints
//   - a safetensors file
//   - a Hugging Face directory: model.safetensors, or model.safetensors.index.json and the shards that it names
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "penstock/train/checkpoint_info.h"

namespace penstock::internal {

// Thrown for weights that cannot be read or do not fit the model. The message names the file, what was found, and what
// was expected.
class WeightsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct WeightFiles {
  // File or directory that was read; for a directory of checkpoints, the path of the last one.
  std::string path;
  // Tensors under the model's own names. They share the memory mapping of the files.
  std::map<std::string, at::Tensor> tensors = {};
  // Description of the checkpoint, if one was read.
  std::optional<CheckpointInfo> checkpoint = std::nullopt;
};

// Reads weights from a file or directory. Throws WeightsError, or CheckpointError for a damaged checkpoint.
WeightFiles read_weight_files(const std::string& path);

// Returns a checksum of the names and bytes of all tensors. It reads the files completely.
std::uint32_t checksum_of(const WeightFiles& weights);

}  // namespace penstock::internal
