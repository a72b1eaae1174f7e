#include "penstock/cli/train/directories.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "penstock/train/checkpoint_directory.h"

namespace penstock::internal::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kHint = "\n  Hint: --resume continues that run, --overwrite starts a new one, ";

}  // namespace

RunDirectories::RunDirectories(const TrainOptions& options) : options_(options), output_(options.output) {
  const std::string& checkpoint = options.checkpoint;
  std::error_code ignored;
  if (!checkpoint.empty()) {
    if (is_checkpoint(checkpoint)) {
      throw RunDirectoryError(checkpoint +
                              ": is a checkpoint, expected the directory that checkpoints are written to.\n" +
                              "  Hint: --checkpoint " + fs::path(checkpoint).lexically_normal().parent_path().string());
    }
    // If both are the same directory, it is locked once.
    if (!fs::equivalent(checkpoint, options.output, ignored)) checkpoint_.emplace(checkpoint);
  }
  if (options.overwrite || options.resume) return;
  const std::optional<std::string> last = checkpoint.empty() ? std::nullopt : last_checkpoint(checkpoint);
  if (last) {
    throw RunDirectoryError(checkpoint + ": has checkpoints of an earlier run, the last of them " +
                            fs::path(*last).filename().string() + "." + kHint + "--checkpoint DIR writes elsewhere.");
  }
  if (fs::exists(metrics(), ignored) && fs::file_size(metrics(), ignored) > 0) {
    throw RunDirectoryError(metrics() + ": has the metrics of an earlier run." + kHint +
                            "--output DIR writes elsewhere.");
  }
}

void RunDirectories::require_space(std::int64_t steps, std::int64_t checkpoint_bytes, std::int64_t metrics) const {
  output_.require_space(static_cast<std::uintmax_t>(metrics), "metrics");
  if (options_.checkpoint.empty()) return;
  // The last --keep checkpoints and the one that is being written, less those that already exist.
  const std::int64_t saves = options_.checkpoint_every > 0 ? steps / options_.checkpoint_every + 1 : 1;
  const std::int64_t existing = options_.overwrite ? 0 : count_checkpoints(options_.checkpoint);
  const std::int64_t count = std::clamp<std::int64_t>(options_.keep + std::int64_t{1} - existing, 1, saves);
  const double bytes =
      static_cast<double>(count) * static_cast<double>(checkpoint_bytes) + static_cast<double>(metrics);
  constexpr double kMost = 1e18;
  (checkpoint_ ? *checkpoint_ : output_)
      .require_space(static_cast<std::uintmax_t>(std::min(bytes, kMost)),
                     std::to_string(count) + (count == 1 ? " checkpoint" : " checkpoints"));
}

void RunDirectories::clear() const {
  if (!options_.checkpoint.empty()) remove_checkpoints(options_.checkpoint);
  std::error_code failed;
  fs::remove(metrics(), failed);
  if (failed) throw RunDirectoryError(metrics() + ": could not be removed: " + failed.message() + ".");
}

std::optional<std::string> RunDirectories::rename_old_metrics() const {
  const auto require_success = [](const std::string& path, const std::error_code& error) {
    if (error) throw RunDirectoryError(path + ": could not be renamed: " + error.message() + ".");
  };
  std::error_code error;
  const bool is_there = fs::exists(metrics(), error);
  require_success(metrics(), error);
  if (!is_there) return std::nullopt;
  std::string renamed;
  bool is_taken = true;
  for (int number = 1; is_taken; ++number) {
    renamed = file("metrics-" + std::to_string(number) + ".jsonl");
    is_taken = fs::exists(renamed, error);
    require_success(renamed, error);
  }
  fs::rename(metrics(), renamed, error);
  require_success(metrics(), error);
  return renamed;
}

std::string RunDirectories::file(const std::string& name) const {
  return (fs::path(options_.output) / name).string();
}

}  // namespace penstock::internal::cli
