// Checkpoints: folders FOLDER/step-00000100 with safetensors files, under the model's own names, and manifest.json, which
// says what belongs together. One is written aside, synced, and renamed when it is whole: a folder with that name is good,
// whatever happens to the process that writes. `safetensors` in Python opens the files.
//
//   manifest.json            version, step, run, model, the configuration of the run; of each file its size and checksum
//   weights-0.safetensors    parameters and buffers of part 0, "blocks.0.qkv.weight"
//   optimizer-0.safetensors  what the optimizer remembers of them, "blocks.0.qkv.weight.exp_avg"
//
// Parts are what ranks have; who reads does not care which name lies in which part, so a run goes on with other ranks,
// stages and schedules.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/tensor/safetensors.h"

namespace penstock::internal {

// The message names the file, what is wrong with it, and what can be done.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CheckpointInfo {
  // How many steps have been done.
  std::int64_t step = 0;
  // Tells the checkpoints of this run from those of others; a run that is resumed keeps it.
  std::string run = {};
  // In a line: Model::description.
  std::string model;
  // JSON; whatever the run wants to know again.
  std::string configuration = "{}";
  // Names among the weights that the model's state_dict does not have.
  std::vector<std::string> non_persistent_buffers = {};
};

// Writes one checkpoint. One process begins it, all that have a part write it, and one finishes it when they are done: the
// meetings between are the callers'. All throw CheckpointError, and the older checkpoints stay as they are.
class CheckpointWriter {
 public:
  CheckpointWriter(std::string folder, std::int64_t step);

  // Makes the folders, and removes what a run that was killed has left.
  void begin() const;
  void write_part(int part, const NamedTensors& weights, const NamedTensors& optimizer) const;
  // With parts 0 to `parts` - 1. Of this checkpoint and those of the run's earlier steps the last `keep` stay; those of
  // later steps and of other runs are left alone. One of another run with the same step is an error.
  void finish(const CheckpointInfo& info, int parts, int keep) const;
  // Removes a checkpoint that cannot be finished, as far as the file system lets it.
  void discard() const noexcept;

  // Of the finished checkpoint.
  std::string path() const;

 private:
  void prune(const std::string& run, int keep) const;

  std::string folder_;
  std::string name_;
};

// What a checkpoint of a model has.
struct ModelTensors {
  // Model::description.
  std::string description;
  // Names of all parameters and buffers; a checkpoint has no others. Empty: any.
  std::set<std::string> names = {};
  // Tensors that this process reads into: the checkpoint has ones of their sizes and dtypes, and optimizer state that fits.
  std::map<std::string, at::Tensor> needed = {};
};

class Checkpoint {
 public:
  // `path` is one checkpoint, or a folder of them, of which the last is taken. Every file is held against its checksum.
  // Throws CheckpointError.
  explicit Checkpoint(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointInfo& info() const { return info_; }
  // Throws CheckpointError unless it is of this model, with what differs in at most ten lines.
  void require_model(const ModelTensors& model) const;

  // By name; they share the file's mapping. Throws CheckpointError for one that is not there.
  at::Tensor weight(const std::string& name) const;
  // None for what the optimizer did not remember.
  std::optional<at::Tensor> optimizer_state(const std::string& name) const;
  const std::map<std::string, at::Tensor>& weights() const { return weights_; }

 private:
  void read_manifest();
  void read_file(const std::string& name, std::map<std::string, at::Tensor>& to) const;

  std::string path_;
  CheckpointInfo info_;
  std::map<std::string, at::Tensor> weights_;
  std::map<std::string, at::Tensor> optimizer_;
};

// Returns true if `path` is itself a finished checkpoint, rather than a directory of them. Throws CheckpointError when the
// system does not say.
bool is_checkpoint(const std::string& path);
// Returns the path of the last checkpoint in a directory, or none. Throws CheckpointError for one that has lost its manifest.
std::optional<std::string> last_checkpoint(const std::string& folder);
// Returns a CheckpointInfo::run that no other run has.
std::string new_run_id();
// Throws CheckpointError if a directory has checkpoints of several runs.
void require_one_run(const std::string& folder);
// Returns the number of finished checkpoints in a directory.
std::int64_t count_checkpoints(const std::string& folder);
// Removes all checkpoints of a directory, finished or not. Throws CheckpointError.
void remove_checkpoints(const std::string& folder);
// Removes what runs that were killed have left of checkpoints that they wrote or removed. Throws CheckpointError.
void remove_unfinished_checkpoints(const std::string& folder);

}  // namespace penstock::internal
