// Directories of checkpoints: which checkpoints they contain, and how those are removed. A directory has one
// subdirectory per checkpoint, step-00000100 and so on (see checkpoint.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/train/checkpoint_info.h"

namespace penstock::internal {

// Returns true if `path` is itself a finished checkpoint, rather than a directory of checkpoints. Throws
// CheckpointError when the system cannot tell.
bool is_checkpoint(const std::string& path);

// Returns the subdirectory of the checkpoint of a step: "step-00000100".
std::string checkpoint_name(std::int64_t step);

// Returns the finished checkpoints of a directory as (step, path), in ascending order. A missing directory has none.
// Throws CheckpointError.
std::vector<std::pair<std::int64_t, std::filesystem::path>> list_checkpoints(const std::filesystem::path& directory);

// Returns the path of the checkpoint with the highest step, or none. Throws CheckpointError if that one has lost its
// manifest: a checkpoint is renamed to step-N only when it is complete, so it was damaged later.
std::optional<std::string> last_checkpoint(const std::string& directory);

// Returns the number of finished checkpoints in a directory.
std::int64_t count_checkpoints(const std::string& directory);

// Throws CheckpointError if a directory has checkpoints of several runs.
void require_one_run(const std::string& directory);

// Removes one checkpoint. It is renamed first, so that the name step-N always refers to a complete checkpoint. Throws
// std::filesystem::filesystem_error.
void remove_checkpoint(const std::filesystem::path& checkpoint);
// Removes the directories that killed runs have left while they wrote or removed checkpoints. Throws
// std::filesystem::filesystem_error.
void remove_leftovers(const std::filesystem::path& directory);

// Removes all checkpoints of a directory, finished or not. Throws CheckpointError.
void remove_checkpoints(const std::string& directory);
// Does what remove_leftovers does, and throws CheckpointError.
void remove_unfinished_checkpoints(const std::string& directory);

}  // namespace penstock::internal
