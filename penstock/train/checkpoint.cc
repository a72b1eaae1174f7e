#include "penstock/train/checkpoint.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/checkpoint_directory.h"
#include "penstock/train/checkpoint_format.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;
namespace format = checkpoint_format;
using nlohmann::json;

constexpr const char* kOlderHint =
    "\n  Hint: an older checkpoint may be good: name it, or move this one away to resume from it.";

// Returns true for the name of a file in the checkpoint's own directory.
bool is_plain_name(const json& name) {
  if (!name.is_string()) return false;
  const auto& text = name.get_ref<const std::string&>();
  return !text.empty() && text != "." && text != ".." && text.find('/') == std::string::npos &&
         text.find('\0') == std::string::npos;
}

// Reads and checks the manifest of a checkpoint, without the files that it lists.
json verified_manifest(const std::string& checkpoint) {
  const std::string path = (fs::path(checkpoint) / format::kManifest).string();
  json manifest = format::read_json(path);
  if (manifest.value("format", "") != format::kFormat) {
    format::fail(path, "is not the manifest of a Penstock checkpoint.");
  }
  if (manifest.at("version") != format::kVersion) {
    format::fail(path,
                 concat("has version ", manifest.at("version").dump(), ", expected version ", format::kVersion, "."));
  }
  if (manifest.value(format::kChecksum, json()) != format::checksum_of(manifest)) {
    format::fail(path, concat("is damaged: its checksum does not match.", kOlderHint));
  }
  // A correct checksum does not mean that Penstock wrote the manifest, so its values are checked too.
  const auto require = [&](bool holds, const std::string& problem) {
    if (!holds) format::fail(path, concat(problem, ".", kOlderHint));
  };
  constexpr std::int64_t kMaxStep = std::int64_t{1} << 53U;
  const json& step = manifest.at("step");
  require(step.is_number_integer() && step >= 0 && step <= kMaxStep,
          concat("has the step ", step.dump(), ", expected a non-negative integer"));
  require(manifest.at("run").is_string(), "has no run id");
  require(manifest.at("configuration").is_object(), "has no configuration that is an object");
  if (const auto scaler = manifest.find("grad_scaler"); scaler != manifest.end()) {
    const json& scale = scaler->at("scale");
    const json& tracker = scaler->at("growth_tracker");
    require(scale.is_number() && scale > 0 && scale <= std::numeric_limits<float>::max(),
            concat("has the loss scale ", scale.dump(), ", expected a positive number"));
    require(tracker.is_number_unsigned(),
            concat("has the growth tracker ", tracker.dump(), ", expected a number of steps"));
  }
  std::set<std::string> listed;
  for (const json& file : manifest.at("files")) {
    const json& name = file.at("name");
    require(is_plain_name(name), concat("lists a file outside the checkpoint, ", name.dump()));
    require(listed.insert(name).second, concat("lists the file ", name.dump(), " twice"));
    require(file.at("bytes").is_number_unsigned() && file.at("crc32").is_number_unsigned(),
            concat("has no size and checksum of ", name.dump()));
    require(file.at("kind") == "weights" || file.at("kind") == "optimizer",
            concat("lists ", name.dump(), " with the unknown kind ", file.at("kind").dump()));
  }
  std::error_code error;
  fs::directory_iterator entry(checkpoint, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const fs::path name = entry->path().filename();
    require(name.extension() != ".safetensors" || listed.contains(name.string()),
            concat("does not list the file ", json(name.string()).dump(), ", which exists"));
  }
  if (error) format::fail_to_read(checkpoint, error);
  return manifest;
}

// Compares a file's size and checksum with its entry in the manifest.
void verify_file(const std::string& checkpoint, const json& entry) {
  const std::string path = (fs::path(checkpoint) / entry.at("name").get<std::string>()).string();
  json found;
  try {
    found = format::file_entry(path);
  } catch (const MappingError& failure) {
    throw CheckpointError(concat(failure.what(), kOlderHint));
  }
  if (found.at("bytes") != entry.at("bytes")) {
    format::fail(path, concat("has ", found.at("bytes").dump(), " bytes, and the manifest says ",
                              entry.at("bytes").dump(), ".", kOlderHint));
  }
  if (found.at("crc32") != entry.at("crc32")) {
    format::fail(path, concat("is damaged: its checksum does not match.", kOlderHint));
  }
}

// Returns one line for each tensor that differs between a checkpoint and a model.
std::vector<std::string> differences_between(const CheckpointInfo& info,
                                             const std::map<std::string, at::Tensor>& weights,
                                             const std::map<std::string, at::Tensor>& optimizer,
                                             const ModelTensors& model) {
  std::vector<std::string> differences;
  const auto compare = [&](const std::string& name, const at::Tensor& found, const at::Tensor& expected) {
    if (found.sizes() != expected.sizes()) {
      differences.push_back(concat(name, ": ", shape_text(found.sizes()), " in the checkpoint, ",
                                   shape_text(expected.sizes()), " in this model"));
    } else if (found.scalar_type() != expected.scalar_type()) {
      differences.push_back(concat(name, ": ", dtype_name(found.scalar_type()), " in the checkpoint, ",
                                   dtype_name(expected.scalar_type()), " in this model"));
    }
  };
  for (const auto& [name, tensor] : model.needed) {
    if (const auto found = weights.find(name); found != weights.end()) compare(name, found->second, tensor);
  }
  for (const auto& [name, state] : optimizer) {
    const std::size_t dot = name.rfind('.');
    const auto parameter = model.needed.find(name.substr(0, dot));
    if (parameter == model.needed.end()) continue;
    // The step count is a scalar; all other state has the shape and dtype of its parameter.
    const bool is_count = name.substr(dot + 1) == "step";
    compare(name, state, is_count ? at::empty({}, at::kLong) : parameter->second);
  }
  // Names that no stage needs may be missing: a parameter that the model does not use is in no checkpoint.
  std::set<std::string> expected;
  for (const auto& [name, tensor] : model.needed) expected.insert(name);
  if (info.model != model.description) expected.insert(model.names.begin(), model.names.end());
  for (const std::string& name : expected) {
    if (!weights.contains(name)) differences.push_back(name + ": only in this model");
  }
  for (const auto& [name, tensor] : weights) {
    if (!model.names.empty() && !model.names.contains(name)) differences.push_back(name + ": only in the checkpoint");
  }
  return differences;
}

}  // namespace

Checkpoint::Checkpoint(const std::string& path) : path_(path) {
  if (!format::path_exists(path)) format::fail(path, "there is no such checkpoint.");
  if (!is_checkpoint(path)) {
    const std::optional<std::string> newest = last_checkpoint(path);
    if (!newest) format::fail(path, "has no checkpoint: neither manifest.json nor a directory step-N with one.");
    path_ = *newest;
  }
  try {
    read_manifest();
  } catch (const json::exception& error) {
    format::fail((fs::path(path_) / format::kManifest).string(), concat("is damaged: ", error.what(), "."));
  }
}

void Checkpoint::read_manifest() {
  const json manifest = verified_manifest(path_);
  info_ = {.step = manifest.at("step"),
           .run = manifest.at("run"),
           .model = manifest.at("model"),
           .configuration = manifest.at("configuration").dump(),
           .non_persistent_buffers = manifest.value("non_persistent_buffers", std::vector<std::string>())};
  if (manifest.contains("grad_scaler")) {
    const json& scaler = manifest.at("grad_scaler");
    info_.grad_scaler = GradScaler::State{.scale = scaler.at("scale"), .growth_tracker = scaler.at("growth_tracker")};
  }
  for (const json& file : manifest.at("files")) {
    verify_file(path_, file);
    read_file(file.at("name"), file.at("kind") == "weights" ? weights_ : optimizer_);
  }
}

void Checkpoint::read_file(const std::string& name, std::map<std::string, at::Tensor>& tensors) const {
  try {
    for (auto& [tensor_name, tensor] : read_safetensors((fs::path(path_) / name).string(), FileAccess::MapReadOnly)) {
      tensors.emplace(tensor_name, std::move(tensor));
    }
  } catch (const SafetensorsError& error) {
    throw CheckpointError(error.what());
  }
}

void Checkpoint::require_model(const ModelTensors& model) const {
  const std::vector<std::string> differences = differences_between(info_, weights_, optimizer_, model);
  if (info_.model == model.description && differences.empty()) return;
  constexpr std::size_t kMaxLines = 10;
  std::vector<std::string> lines{path_ + ": belongs to another model."};
  if (info_.model != model.description) {
    lines.push_back("Found:    " + info_.model);
    lines.push_back("Expected: " + model.description);
  }
  const std::size_t left = kMaxLines - lines.size();
  const std::size_t shown = differences.size() <= left ? differences.size() : left - 1;
  lines.insert(lines.end(), differences.begin(), differences.begin() + static_cast<std::ptrdiff_t>(shown));
  if (shown < differences.size()) lines.push_back(concat("… and ", differences.size() - shown, " more"));
  throw CheckpointError(join(lines, "\n  "));
}

at::Tensor Checkpoint::weight(const std::string& name) const {
  const auto found = weights_.find(name);
  if (found == weights_.end()) format::fail(path_, concat("has no tensor '", name, "'."));
  return found->second;
}

std::optional<at::Tensor> Checkpoint::optimizer_state(const std::string& name) const {
  const auto found = optimizer_.find(name);
  return found == optimizer_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace penstock::internal
