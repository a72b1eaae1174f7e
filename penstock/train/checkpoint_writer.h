// Writes checkpoints. A checkpoint is written under another name, synced to disk, and renamed when it is complete: a
// directory step-N is valid, whenever the writing process was killed.
#pragma once

#include <cstdint>
#include <string>

#include "penstock/tensor/safetensors.h"
#include "penstock/train/checkpoint_info.h"

namespace penstock::internal {

// Writes one checkpoint. One process calls begin(), every process that has a part writes it, and one process calls
// finish(). The caller synchronises the processes between these calls. All members throw CheckpointError, and leave
// older checkpoints as they are.
//
//   const CheckpointWriter writer("checkpoints", /*step=*/100);
//   writer.begin();
//   writer.write_part(0, weights, optimizer_state);
//   writer.finish({.step = 100, .run = run, .model = model.description()}, /*parts=*/1, /*keep=*/3);
class CheckpointWriter {
 public:
  CheckpointWriter(std::string directory, std::int64_t step);

  // Creates the directories, and removes what killed runs have left.
  void begin() const;
  void write_part(int part, const NamedTensors& weights, const NamedTensors& optimizer) const;
  // Returns true if the parts 0 to `parts` - 1 are on disk.
  bool has_parts(int parts) const;
  // Writes the manifest of the parts 0 to `parts` - 1 and renames the checkpoint. Then removes the run's oldest
  // checkpoints so that `keep` remain, this one included; those of later steps and of other runs are kept. An existing
  // checkpoint of this step is replaced if it belongs to the same run, and otherwise is an error.
  void finish(const CheckpointInfo& info, int parts, int keep) const;
  // Removes a checkpoint that cannot be finished, as far as the file system allows.
  void discard() const noexcept;

  // Returns the path of the finished checkpoint.
  std::string path() const;

 private:
  std::string unfinished_path() const;
  void prune(const std::string& run, int keep) const;

  std::string directory_;
  std::string name_;
};

}  // namespace penstock::internal
