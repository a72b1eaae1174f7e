#include "penstock/train/checkpoint_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/json.h"
#include "penstock/tensor/atomic_file_writer.h"
#include "penstock/train/checkpoint_directory.h"
#include "penstock/train/checkpoint_format.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;
namespace format = checkpoint_format;
using nlohmann::json;

void sync_directory(const fs::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // File systems that cannot sync a directory report EINVAL.
  const bool synced = descriptor >= 0 && (::fsync(descriptor) == 0 || errno == EINVAL);
  const int reason = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (!synced) {
    format::fail(directory.string(), concat("could not be written: ", std::generic_category().message(reason), "."));
  }
}

void write_file(const fs::path& path, const std::string& text) {
  AtomicFileWriter file(path.string());
  file.write(text.data(), text.size());
  file.commit();
}

// Returns the name of the list of a part's files, which exists until the manifest has its contents.
std::string part_name(int part) {
  return concat("part-", part, ".json");
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string directory, std::int64_t step)
    : directory_(std::move(directory)), name_(checkpoint_name(step)) {}

std::string CheckpointWriter::path() const {
  return (fs::path(directory_) / name_).string();
}

std::string CheckpointWriter::unfinished_path() const {
  return (fs::path(directory_) / concat(format::kUnfinished, name_)).string();
}

void CheckpointWriter::begin() const {
  format::with_checkpoint_errors(directory_, "written", [&] {
    fs::create_directories(directory_);
    remove_leftovers(directory_);
    fs::create_directory(unfinished_path());
  });
}

void CheckpointWriter::write_part(int part, const NamedTensors& weights, const NamedTensors& optimizer) const {
  const fs::path unfinished = unfinished_path();
  format::with_checkpoint_errors(unfinished.string(), "written", [&] {
    json files = json::array();
    for (const auto& [kind, tensors] : {std::pair("weights", &weights), std::pair("optimizer", &optimizer)}) {
      const fs::path file = unfinished / concat(kind, "-", part, ".safetensors");
      write_safetensors(file.string(), *tensors);
      files.push_back(format::file_entry(file));
      files.back()["kind"] = kind;
    }
    write_file(unfinished / part_name(part), files.dump());
  });
}

bool CheckpointWriter::has_parts(int parts) const {
  const fs::path unfinished = unfinished_path();
  for (int part = 0; part < parts; ++part) {
    if (!fs::exists(unfinished / part_name(part))) return false;
  }
  return true;
}

void CheckpointWriter::finish(const CheckpointInfo& info, int parts, int keep) const {
  const fs::path unfinished = unfinished_path();
  format::with_checkpoint_errors(unfinished.string(), "written", [&] {
    json files = json::array();
    for (int part = 0; part < parts; ++part) {
      const std::string list = (unfinished / part_name(part)).string();
      if (!fs::exists(list)) format::fail(list, "is missing: a rank has not written its part.");
      for (const json& file : format::read_json(list, json::value_t::array)) files.push_back(file);
    }
    json manifest = {{"format", format::kFormat},
                     {"version", format::kVersion},
                     {"step", info.step},
                     {"run", info.run},
                     {"model", info.model},
                     {"configuration", parse_json(info.configuration)},
                     {"non_persistent_buffers", info.non_persistent_buffers},
                     {"files", files}};
    if (info.grad_scaler) {
      manifest["grad_scaler"] = {{"scale", info.grad_scaler->scale},
                                 {"growth_tracker", info.grad_scaler->growth_tracker}};
    }
    manifest[format::kChecksum] = format::checksum_of(manifest);
    write_file(unfinished / format::kManifest, manifest.dump(2) + "\n");
    for (int part = 0; part < parts; ++part) fs::remove(unfinished / part_name(part));
    sync_directory(unfinished);
    if (fs::exists(path()) && !is_checkpoint(path())) {
      format::fail(path(), "exists and is not a checkpoint, so it is not replaced.\n  Hint: move it away.");
    }
    if (fs::exists(path()) && format::run_of(path()) != info.run) {
      format::fail(path(), "is a checkpoint of another run, so it is not replaced.\n  Hint: choose another directory.");
    }
    // An older checkpoint of this step is replaced atomically.
    const unsigned flags = fs::exists(path()) ? RENAME_EXCHANGE : 0;
    if (::renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, path().c_str(), flags) != 0) {
      format::fail(path(), concat("could not be written: ", std::generic_category().message(errno), "."));
    }
    sync_directory(directory_);
  });
  // The new checkpoint is complete, so the one that it has replaced and the oldest ones can go.
  format::with_checkpoint_errors(directory_, "removed", [&] {
    fs::remove_all(unfinished);
    prune(info.run, keep);
  });
}

void CheckpointWriter::prune(const std::string& run, int keep) const {
  std::vector<std::pair<std::int64_t, fs::path>> finished = list_checkpoints(directory_);
  std::erase_if(finished, [&](const auto& entry) { return format::run_of(entry.second) != run; });
  const auto written =
      std::ranges::find_if(finished, [&](const auto& entry) { return entry.second.filename() == name_; });
  const auto older = static_cast<std::size_t>(std::distance(finished.begin(), written));
  const auto kept = static_cast<std::size_t>(std::max(keep, 1)) - 1;
  for (std::size_t i = 0; i + kept < older; ++i) remove_checkpoint(finished[i].second);
}

void CheckpointWriter::discard() const noexcept {
  try {
    fs::remove_all(unfinished_path());
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next run removes it
  }
}

}  // namespace penstock::internal
