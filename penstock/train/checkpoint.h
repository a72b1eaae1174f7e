// Checkpoints of training runs. A checkpoint is a directory DIRECTORY/step-00000100:
//
//   manifest.json            format version, step, run id, model, options of the run; size and CRC-32 of each file
//   weights-0.safetensors    parameters and buffers of part 0 under the model's own names, "blocks.0.qkv.weight"
//   optimizer-0.safetensors  optimizer state of part 0, "blocks.0.qkv.weight.exp_avg"
//
// Each rank writes one part. A reader merges the parts, so a run can resume with another number of ranks, other stages
// and another schedule. The `safetensors` package of Python opens the files.
//
// Related: checkpoint_writer.h writes checkpoints, checkpoint_directory.h lists and removes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <set>
#include <string>

#include "penstock/train/checkpoint_info.h"

namespace penstock::internal {

// Names and tensors of a model that a checkpoint has to match.
struct ModelTensors {
  // Model::description.
  std::string description;
  // Names of all parameters and buffers. A checkpoint with any other name is refused; if empty, every name is accepted.
  std::set<std::string> names = {};
  // Tensors that this process reads. The checkpoint has to contain them with these sizes and dtypes, and optimizer
  // state that fits.
  std::map<std::string, at::Tensor> needed = {};
};

// A checkpoint that has been read and verified. Its tensors share the memory mapping of the files.
//
//   const Checkpoint checkpoint("checkpoints");   // the last one of the directory
//   checkpoint.require_model({.description = model.description()});
//   weight.copy_(checkpoint.weight("head.weight"));
class Checkpoint {
 public:
  // Opens a checkpoint, or the last one of a directory of checkpoints, and verifies the checksum of every file. Throws
  // CheckpointError.
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointInfo& info() const { return info_; }
  // Throws CheckpointError unless the checkpoint matches the model. The message lists the differences in at most ten
  // lines.
  void require_model(const ModelTensors& model) const;

  // Returns a parameter or buffer. Throws CheckpointError for an unknown name.
  at::Tensor weight(const std::string& name) const;
  // Returns optimizer state, or none if the optimizer had no such state.
  std::optional<at::Tensor> optimizer_state(const std::string& name) const;
  const std::map<std::string, at::Tensor>& weights() const { return weights_; }

 private:
  void read_manifest();
  void read_file(const std::string& name, std::map<std::string, at::Tensor>& tensors) const;

  std::string path_;
  CheckpointInfo info_;
  std::map<std::string, at::Tensor> weights_;
  std::map<std::string, at::Tensor> optimizer_;
};

}  // namespace penstock::internal
