#include "penstock/train/checkpoint_directory.h"

#include <algorithm>
#include <charconv>
#include <system_error>

#include "penstock/base/text.h"
#include "penstock/train/checkpoint_format.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;
namespace format = checkpoint_format;

// Returns the step of a directory step-N, or none for another name.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(format::kFinished)) return std::nullopt;
  std::int64_t step = 0;
  const char* const begin = name.data() + format::kFinished.size();
  const char* const end = name.data() + name.size();
  const auto [last, error] = std::from_chars(begin, end, step);
  return error == std::errc() && last == end && begin != end ? std::optional(step) : std::nullopt;
}

// Returns the directories step-N, with or without a manifest, in ascending order.
std::vector<std::pair<std::int64_t, fs::path>> list_steps(const fs::path& directory) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  std::error_code error;
  fs::directory_iterator next(directory, error);
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) return found;
  for (; !error && next != fs::directory_iterator(); next.increment(error)) {
    const std::optional<std::int64_t> step = step_of(next->path().filename().string());
    if (step) found.emplace_back(*step, next->path());
  }
  // An incomplete list could hide the newest checkpoint.
  if (error) format::fail_to_read(directory, error);
  std::ranges::sort(found);
  return found;
}

}  // namespace

bool is_checkpoint(const std::string& path) {
  return format::path_exists(fs::path(path) / format::kManifest);
}

std::string checkpoint_name(std::int64_t step) {
  std::string digits = std::to_string(step);
  constexpr std::size_t kDigits = 8;
  if (digits.size() < kDigits) digits.insert(0, kDigits - digits.size(), '0');
  return concat(format::kFinished, digits);
}

std::vector<std::pair<std::int64_t, fs::path>> list_checkpoints(const fs::path& directory) {
  std::vector<std::pair<std::int64_t, fs::path>> found = list_steps(directory);
  std::erase_if(found, [](const auto& entry) { return !is_checkpoint(entry.second.string()); });
  return found;
}

std::optional<std::string> last_checkpoint(const std::string& directory) {
  const auto steps = list_steps(directory);
  if (steps.empty()) return std::nullopt;
  std::string newest = steps.back().second.string();
  if (!is_checkpoint(newest)) {
    format::fail(newest, "has no manifest.json.\n  Hint: move it away to use an older checkpoint, or name that one.");
  }
  return newest;
}

std::int64_t count_checkpoints(const std::string& directory) {
  return static_cast<std::int64_t>(list_checkpoints(directory).size());
}

void require_one_run(const std::string& directory) {
  std::optional<std::string> first_run;
  fs::path first_checkpoint;
  for (const auto& [step, checkpoint] : list_checkpoints(directory)) {
    const std::optional<std::string> run = format::run_of(checkpoint);
    if (!first_run) {
      first_checkpoint = checkpoint;
      first_run = run;
    }
    if (!run || run == first_run) continue;
    format::fail(directory, concat("has checkpoints of different runs: ", first_checkpoint.filename().string(), " and ",
                                   checkpoint.filename().string(),
                                   ".\n  Hint: move those of one run to another directory; each can still be used "
                                   "by its path."));
  }
}

void remove_checkpoint(const fs::path& checkpoint) {
  const fs::path removed = checkpoint.parent_path() / concat(format::kRemoved, checkpoint.filename().string());
  fs::remove_all(removed);
  fs::rename(checkpoint, removed);
  fs::remove_all(removed);
}

void remove_leftovers(const fs::path& directory) {
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(format::kUnfinished) || name.starts_with(format::kRemoved)) leftovers.push_back(entry.path());
  }
  for (const fs::path& leftover : leftovers) fs::remove_all(leftover);
}

void remove_checkpoints(const std::string& directory) {
  format::with_checkpoint_errors(directory, "removed", [&] {
    for (const auto& [step, checkpoint] : list_checkpoints(directory)) remove_checkpoint(checkpoint);
    remove_leftovers(directory);
  });
}

void remove_unfinished_checkpoints(const std::string& directory) {
  format::with_checkpoint_errors(directory, "removed", [&] { remove_leftovers(directory); });
}

}  // namespace penstock::internal
