// The directories that `penstock train` writes to: --output and --checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "penstock/cli/train/options.h"
#include "penstock/train/run_directory.h"

namespace penstock::cli {

// Holds the locks of both for as long as it lives. One process of a run has it, the coordinator.
class RunDirectories {
 public:
  // Locks both directories, and refuses what another run has left in them unless the options say --resume or --overwrite.
  // Nothing is removed yet. Throws RunDirectoryError.
  explicit RunDirectories(const TrainOptions& options);

  // Throws RunDirectoryError when there is less room than the run will take: `metrics` bytes in the output directory, and
  // the checkpoints of `steps` steps.
  void require_space(std::int64_t steps, std::int64_t checkpoint_bytes, std::int64_t metrics) const;

  // Removes the checkpoints and the metrics of an earlier run, for --overwrite.
  void clear() const;
  // Renames the metrics of a run that has left no checkpoint, for a --resume that begins anew. Returns their new path; none
  // if there are no metrics. Throws RunDirectoryError.
  std::optional<std::string> set_metrics_aside() const;

  std::string file(const std::string& name) const;
  std::string metrics() const { return file("metrics.jsonl"); }

 private:
  const TrainOptions& options_;
  RunDirectory output_;
  std::optional<RunDirectory> checkpoint_;
};

}  // namespace penstock::cli
