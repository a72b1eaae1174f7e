#include "penstock/train/checkpoint.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>

#include "penstock/schedule/json.h"
#include "penstock/tensor/atomic_file_writer.h"
#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kFormat = "penstock checkpoint";
constexpr int kVersion = 3;
constexpr const char* kManifest = "manifest.json";
// The manifest's entry for its own CRC-32.
constexpr const char* kChecksum = "crc32";
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kUnfinished = ".unfinished-";
// Prefix of a checkpoint that is being removed.
constexpr std::string_view kRemoved = ".removed-";

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw CheckpointError(path + ": " + what);
}

// Calls `function`, which writes or removes files, as `done` says, and puts what the system answers into words.
template <class Function>
auto in_words(const std::string& path, const std::string& done, Function function) {
  try {
    return function();
  } catch (const fs::filesystem_error& error) {
    fail(error.path1().empty() ? path : error.path1().string(),
         "could not be " + done + ": " + error.code().message() + ".");
  } catch (const AtomicFileWriter::Error& error) {
    throw CheckpointError(error.what());
  } catch (const SafetensorsError& error) {
    throw CheckpointError(error.what());
  } catch (const MappingError& error) {
    throw CheckpointError(error.what());
  }
}

[[noreturn]] void fail_to_read(const fs::path& path, const std::error_code& error) {
  fail(path.string(), "could not be read: " + error.message() + ".");
}

// Fails when the system does not say.
bool is_there(const fs::path& path) {
  std::error_code error;
  const bool found = fs::exists(path, error);
  if (error) fail_to_read(path, error);
  return found;
}

std::string sizes_text(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << sizes;
  return text.str();
}

std::string folder_name(std::int64_t step) {
  std::string digits = std::to_string(step);
  constexpr std::size_t kDigits = 8;
  if (digits.size() < kDigits) digits.insert(0, kDigits - digits.size(), '0');
  return std::string(kPrefix) + digits;
}

// The step of a finished checkpoint's folder; none for any other name.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* const begin = name.data() + kPrefix.size();
  const char* const end = name.data() + name.size();
  const auto [last, error] = std::from_chars(begin, end, step);
  return error == std::errc() && last == end && begin != end ? std::optional(step) : std::nullopt;
}

// Returns the directories step-N, by step; none if there is no such folder.
std::vector<std::pair<std::int64_t, fs::path>> steps_in(const fs::path& folder) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  std::error_code error;
  fs::directory_iterator next(folder, error);
  if (error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory) return found;
  for (; !error && next != fs::directory_iterator(); next.increment(error)) {
    const std::optional<std::int64_t> step = step_of(next->path().filename().string());
    if (step) found.emplace_back(*step, next->path());
  }
  // A list that is not whole would hide the newest.
  if (error) fail_to_read(folder, error);
  std::ranges::sort(found);
  return found;
}

// Those of them that are checkpoints.
std::vector<std::pair<std::int64_t, fs::path>> finished_in(const fs::path& folder) {
  std::vector<std::pair<std::int64_t, fs::path>> found = steps_in(folder);
  std::erase_if(found, [](const auto& one) { return !is_checkpoint(one.second.string()); });
  return found;
}

// Returns the checkpoint of the last step. A directory step-N is renamed when it is whole, so one without a manifest has been
// damaged since.
std::optional<std::string> newest_in(const fs::path& folder) {
  const auto all = steps_in(folder);
  if (all.empty()) return std::nullopt;
  const std::string newest = all.back().second.string();
  if (!is_checkpoint(newest)) {
    fail(newest, "has no manifest.json.\n  Hint: move it away to take an older checkpoint, or name that one.");
  }
  return newest;
}

void sync_folder(const fs::path& folder) {
  const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Some file systems cannot sync a folder, and say so with EINVAL.
  const bool synced = opened >= 0 && (::fsync(opened) == 0 || errno == EINVAL);
  const int reason = errno;
  if (opened >= 0) ::close(opened);
  if (!synced) fail(folder.string(), "could not be written: " + std::generic_category().message(reason) + ".");
}

// Removes what runs that were killed have left in `folder`.
void remove_leftovers(const fs::path& folder) {
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kUnfinished) || name.starts_with(kRemoved)) leftovers.push_back(entry.path());
  }
  for (const fs::path& leftover : leftovers) fs::remove_all(leftover);
}

// Renames a checkpoint aside and then removes it, so that its name stands for a whole checkpoint or for none.
void remove_checkpoint(const fs::path& checkpoint) {
  const fs::path removed = checkpoint.parent_path() / (std::string(kRemoved) + checkpoint.filename().string());
  fs::remove_all(removed);
  fs::rename(checkpoint, removed);
  fs::remove_all(removed);
}

void write_file(const fs::path& path, const std::string& text) {
  AtomicFileWriter file(path.string());
  file.write(text.data(), text.size());
  file.commit();
}

std::string file_name(const char* kind, int part) {
  return std::string(kind) + "-" + std::to_string(part) + ".safetensors";
}

// Beside the files of a part until the manifest has it.
std::string part_name(int part) {
  return "part-" + std::to_string(part) + ".json";
}

json description_of(const fs::path& file) {
  const MappedFile mapped(file.string());
  const std::string_view bytes = mapped.bytes();
  return {{"name", file.filename().string()},
          {"bytes", bytes.size()},
          {"crc32", crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size())}};
}

// Returns none for a file whose JSON is damaged, or of another kind.
std::optional<json> try_read_json(const std::string& path, json::value_t kind) {
  try {
    std::optional<json> parsed = try_parse_json(MappedFile(path).bytes());
    if (!parsed || parsed->type() != kind) return std::nullopt;
    return parsed;
  } catch (const MappingError& failure) {
    throw CheckpointError(failure.what());
  }
}

json read_json(const std::string& path, json::value_t kind = json::value_t::object) {
  std::optional<json> parsed = try_read_json(path, kind);
  if (!parsed) fail(path, "is damaged: it is not JSON.");
  return *std::move(parsed);
}

// Returns the checksum of a manifest without its own entry.
std::uint64_t checksum_of(json manifest) {
  manifest.erase(kChecksum);
  const std::string text = manifest.dump();
  return crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size());
}

// Returns the run of a finished checkpoint; none for one whose manifest does not say, as it is damaged.
std::optional<std::string> run_of(const fs::path& checkpoint) {
  const std::optional<json> manifest = try_read_json((checkpoint / kManifest).string(), json::value_t::object);
  if (!manifest || !manifest->value("run", json()).is_string()) return std::nullopt;
  return manifest->at("run").get<std::string>();
}

// Returns true for a name in the checkpoint's own directory.
bool is_own_name(const json& name) {
  if (!name.is_string()) return false;
  const auto& text = name.get_ref<const std::string&>();
  return !text.empty() && text != "." && text != ".." && text.find('/') == std::string::npos &&
         text.find('\0') == std::string::npos;
}

}  // namespace

CheckpointWriter::CheckpointWriter(std::string folder, std::int64_t step)
    : folder_(std::move(folder)), name_(folder_name(step)) {}

std::string CheckpointWriter::path() const {
  return (fs::path(folder_) / name_).string();
}

void CheckpointWriter::begin() const {
  in_words(folder_, "written", [&] {
    fs::create_directories(folder_);
    remove_leftovers(folder_);
    fs::create_directory(fs::path(folder_) / (std::string(kUnfinished) + name_));
  });
}

void CheckpointWriter::write_part(int part, const NamedTensors& weights, const NamedTensors& optimizer) const {
  const fs::path unfinished = fs::path(folder_) / (std::string(kUnfinished) + name_);
  in_words(unfinished.string(), "written", [&] {
    json files = json::array();
    for (const auto& [kind, tensors] : {std::pair("weights", &weights), std::pair("optimizer", &optimizer)}) {
      const fs::path file = unfinished / file_name(kind, part);
      write_safetensors(file.string(), *tensors);
      files.push_back(description_of(file));
      files.back()["kind"] = kind;
    }
    write_file(unfinished / part_name(part), files.dump());
  });
}

void CheckpointWriter::finish(const CheckpointInfo& info, int parts, int keep) const {
  const fs::path unfinished = fs::path(folder_) / (std::string(kUnfinished) + name_);
  in_words(unfinished.string(), "written", [&] {
    json files = json::array();
    for (int part = 0; part < parts; ++part) {
      const std::string described = (unfinished / part_name(part)).string();
      if (!fs::exists(described)) fail(described, "is missing: a rank has not written its part.");
      for (const json& file : read_json(described, json::value_t::array)) files.push_back(file);
    }
    json manifest = {{"format", kFormat},
                     {"version", kVersion},
                     {"step", info.step},
                     {"run", info.run},
                     {"model", info.model},
                     {"configuration", parse_json(info.configuration)},
                     {"non_persistent_buffers", info.non_persistent_buffers},
                     {"files", files}};
    manifest[kChecksum] = checksum_of(manifest);
    write_file(unfinished / kManifest, manifest.dump(2) + "\n");
    for (int part = 0; part < parts; ++part) fs::remove(unfinished / part_name(part));
    sync_folder(unfinished);
    if (fs::exists(path()) && !is_checkpoint(path())) {
      fail(path(), "is there and is not a checkpoint, so it is not replaced.\n  Hint: move it away.");
    }
    if (fs::exists(path()) && run_of(path()) != info.run) {
      fail(path(), "is a checkpoint of another run, so it is not replaced.\n  Hint: choose another directory.");
    }
    // An older one of this step gives way in one go.
    const unsigned flags = fs::exists(path()) ? RENAME_EXCHANGE : 0;
    if (::renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, path().c_str(), flags) != 0) {
      fail(path(), "could not be written: " + std::generic_category().message(errno) + ".");
    }
    sync_folder(folder_);
  });
  // The checkpoint is there; what is left of an older one, and those before it, are not needed any more.
  in_words(folder_, "removed", [&] {
    fs::remove_all(unfinished);
    prune(info.run, keep);
  });
}

void CheckpointWriter::prune(const std::string& run, int keep) const {
  std::vector<std::pair<std::int64_t, fs::path>> finished = finished_in(folder_);
  std::erase_if(finished, [&](const auto& one) { return run_of(one.second) != run; });
  // The one of this step has just been written.
  const auto written = std::ranges::find_if(finished, [&](const auto& one) { return one.second.filename() == name_; });
  const auto older = static_cast<std::size_t>(std::distance(finished.begin(), written));
  const auto kept = static_cast<std::size_t>(std::max(keep, 1)) - 1;
  for (std::size_t i = 0; i + kept < older; ++i) remove_checkpoint(finished[i].second);
}

void CheckpointWriter::discard() const noexcept {
  try {
    fs::remove_all(fs::path(folder_) / (std::string(kUnfinished) + name_));
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next run removes it
  }
}

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  if (!is_there(path)) fail(path, "there is no such checkpoint.");
  if (!is_checkpoint(path)) {
    const std::optional<std::string> newest = newest_in(path);
    if (!newest) fail(path, "has no checkpoint in it: neither manifest.json nor a folder step-N with one.");
    path_ = *newest;
  }
  try {
    read_manifest();
  } catch (const json::exception& error) {
    fail((fs::path(path_) / kManifest).string(), "is damaged: " + std::string(error.what()) + ".");
  }
}

void Checkpoint::read_manifest() {
  const std::string path = (fs::path(path_) / kManifest).string();
  const json manifest = read_json(path);
  if (manifest.value("format", "") != kFormat) fail(path, "is not that of a Penstock checkpoint.");
  if (manifest.at("version") != kVersion) {
    fail(path, "is of version " + manifest.at("version").dump() + "; version " + std::to_string(kVersion) +
                   " is what can be read.");
  }
  const std::string hint =
      "\n  Hint: an older checkpoint may be good: name it, or move this one away to resume from it.";
  if (manifest.value(kChecksum, json()) != checksum_of(manifest)) {
    fail(path, "is damaged: it does not have its checksum." + hint);
  }
  // Written so by no version of Penstock, even if the checksum is right.
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) fail(path, what + "." + hint);
  };
  constexpr std::int64_t kMostSteps = std::int64_t{1} << 53U;
  const json& step = manifest.at("step");
  require(step.is_number_integer() && step >= 0 && step <= kMostSteps,
          "has the step " + step.dump() + ", expected a whole number that is not negative");
  require(manifest.at("run").is_string(), "does not say of which run it is");
  require(manifest.at("configuration").is_object(), "has no configuration that is an object");
  std::set<std::string> listed;
  for (const json& file : manifest.at("files")) {
    const json& name = file.at("name");
    require(is_own_name(name), "names a file elsewhere, " + name.dump());
    require(listed.insert(name).second, "names the file " + name.dump() + " twice");
    require(file.at("bytes").is_number_unsigned() && file.at("crc32").is_number_unsigned(),
            "has no size and checksum of " + name.dump());
    require(file.at("kind") == "weights" || file.at("kind") == "optimizer",
            "says of " + name.dump() + " that it is of kind " + file.at("kind").dump());
  }
  std::error_code error;
  fs::directory_iterator entry(path_, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const fs::path name = entry->path().filename();
    require(name.extension() != ".safetensors" || listed.contains(name.string()),
            "does not list the file " + json(name.string()).dump() + ", which is there");
  }
  if (error) fail_to_read(path_, error);
  info_ = {.step = step,
           .run = manifest.at("run"),
           .model = manifest.at("model"),
           .configuration = manifest.at("configuration").dump(),
           .non_persistent_buffers = manifest.value("non_persistent_buffers", std::vector<std::string>())};
  for (const json& file : manifest.at("files")) {
    const std::string name = file.at("name");
    const std::string whole = (fs::path(path_) / name).string();
    try {
      const json found = description_of(whole);
      if (found.at("bytes") != file.at("bytes")) {
        fail(whole, "has " + found.at("bytes").dump() + " bytes, and the manifest says " + file.at("bytes").dump() +
                        "." + hint);
      }
      if (found.at("crc32") != file.at("crc32"))
        fail(whole, "is damaged: its bytes do not have their checksum." + hint);
    } catch (const MappingError& failure) {
      throw CheckpointError(failure.what() + hint);
    }
    read_file(name, file.at("kind") == "weights" ? weights_ : optimizer_);
  }
}

void Checkpoint::read_file(const std::string& name, std::map<std::string, at::Tensor>& to) const {
  try {
    for (auto& [tensor_name, tensor] : read_safetensors((fs::path(path_) / name).string())) {
      to.emplace(tensor_name, std::move(tensor));
    }
  } catch (const SafetensorsError& error) {
    throw CheckpointError(error.what());
  }
}

void Checkpoint::require_model(const ModelTensors& model) const {
  std::vector<std::string> differences;
  const auto compare = [&](const std::string& name, const at::Tensor& found, const at::Tensor& wanted) {
    if (found.sizes() != wanted.sizes()) {
      differences.push_back(name + ": " + sizes_text(found.sizes()) + " in the checkpoint, " +
                            sizes_text(wanted.sizes()) + " in this model");
    } else if (found.scalar_type() != wanted.scalar_type()) {
      differences.push_back(name + ": " + dtype_name(found.scalar_type()) + " in the checkpoint, " +
                            dtype_name(wanted.scalar_type()) + " in this model");
    }
  };
  for (const auto& [name, tensor] : model.needed) {
    if (const auto found = weights_.find(name); found != weights_.end()) compare(name, found->second, tensor);
  }
  for (const auto& [name, state] : optimizer_) {
    const std::size_t dot = name.rfind('.');
    const auto parameter = model.needed.find(name.substr(0, dot));
    if (parameter == model.needed.end()) continue;
    // The number of steps is the parameter's, and all else has its form.
    const bool is_count = name.substr(dot + 1) == "step";
    compare(name, state, is_count ? at::empty({}, at::kLong) : parameter->second);
  }
  // A name that nothing needs may be missing: a parameter that the model does not use is in no checkpoint.
  std::set<std::string> wanted;
  for (const auto& [name, tensor] : model.needed) wanted.insert(name);
  if (info_.model != model.description) wanted.insert(model.names.begin(), model.names.end());
  for (const std::string& name : wanted) {
    if (!weights_.contains(name)) differences.push_back(name + ": only in this model");
  }
  for (const auto& [name, tensor] : weights_) {
    if (!model.names.empty() && !model.names.contains(name)) differences.push_back(name + ": only in the checkpoint");
  }
  if (info_.model == model.description && differences.empty()) return;
  constexpr std::size_t kMostLines = 10;
  std::vector<std::string> lines{path_ + ": is of another model."};
  if (info_.model != model.description) {
    lines.push_back("It is of:  " + info_.model);
    lines.push_back("Wanted is: " + model.description);
  }
  const std::size_t room = kMostLines - lines.size();
  const std::size_t shown = differences.size() <= room ? differences.size() : room - 1;
  lines.insert(lines.end(), differences.begin(), differences.begin() + static_cast<std::ptrdiff_t>(shown));
  if (shown < differences.size()) lines.push_back("… and " + std::to_string(differences.size() - shown) + " more");
  std::string message;
  for (const std::string& line : lines) message += (message.empty() ? "" : "\n  ") + line;
  throw CheckpointError(message);
}

at::Tensor Checkpoint::weight(const std::string& name) const {
  const auto found = weights_.find(name);
  if (found == weights_.end()) fail(path_, "has no '" + name + "'.");
  return found->second;
}

std::optional<at::Tensor> Checkpoint::optimizer_state(const std::string& name) const {
  const auto found = optimizer_.find(name);
  return found == optimizer_.end() ? std::nullopt : std::optional(found->second);
}

bool is_checkpoint(const std::string& path) {
  return is_there(fs::path(path) / kManifest);
}

std::optional<std::string> last_checkpoint(const std::string& folder) {
  return newest_in(folder);
}

std::string new_run_id() {
  std::random_device random;
  std::ostringstream text;
  text << std::hex << std::setfill('0');
  constexpr int kWords = 4;
  for (int i = 0; i < kWords; ++i) text << std::setw(2 * sizeof(std::uint32_t)) << std::uint32_t{random()};
  return text.str();
}

void require_one_run(const std::string& folder) {
  const auto all = finished_in(folder);
  std::optional<std::string> first;
  fs::path first_checkpoint;
  for (const auto& [step, checkpoint] : all) {
    const std::optional<std::string> run = run_of(checkpoint);
    if (!first) first_checkpoint = checkpoint;
    if (!first) first = run;
    if (!run || run == first) continue;
    fail(folder, "has checkpoints of different runs: " + first_checkpoint.filename().string() + " and " +
                     checkpoint.filename().string() +
                     ".\n  Hint: move those of one run away; penstock export and --weights take one by its path.");
  }
}

std::int64_t count_checkpoints(const std::string& folder) {
  return static_cast<std::int64_t>(finished_in(folder).size());
}

void remove_checkpoints(const std::string& folder) {
  in_words(folder, "removed", [&] {
    for (const auto& [step, checkpoint] : finished_in(folder)) remove_checkpoint(checkpoint);
    remove_leftovers(folder);
  });
}

void remove_unfinished_checkpoints(const std::string& folder) {
  in_words(folder, "removed", [&] { remove_leftovers(folder); });
}

}  // namespace penstock::internal
