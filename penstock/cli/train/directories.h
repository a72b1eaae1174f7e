// The directories that `penstock train` writes to: the run directory (--output) and the one for checkpoints
// (--checkpoint).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "penstock/cli/train/options.h"
#include "penstock/train/run_directory.h"

namespace penstock::internal::cli {

// Holds the locks of both directories for as long as it lives. Only the coordinator of a run has one.
class RunDirectories {
 public:
  // Locks both directories. Throws RunDirectoryError if another run holds a lock, or if an earlier run has left files
  // and neither --resume nor --overwrite is given. Removes nothing yet.
  explicit RunDirectories(const TrainOptions& options);

  // Throws RunDirectoryError if the disk has too little free space for `metrics` bytes in the run directory and the
  // checkpoints of `steps` steps.
  void require_space(std::int64_t steps, std::int64_t checkpoint_bytes, std::int64_t metrics) const;

  // Removes the checkpoints and the metrics of an earlier run, for --overwrite.
  void clear() const;
  // Renames the metrics of an earlier run that has left no checkpoint, when --resume starts a new run. Returns the new
  // path, or nullopt if there are no metrics. Throws RunDirectoryError.
  std::optional<std::string> rename_old_metrics() const;

  std::string file(const std::string& name) const;
  std::string metrics() const { return file("metrics.jsonl"); }

 private:
  const TrainOptions& options_;
  RunDirectory output_;
  std::optional<RunDirectory> checkpoint_;
};

}  // namespace penstock::internal::cli
