#include "penstock/train/weight_files.h"

#include <zlib.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/json.h"
#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/tensor/tensor_text.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/checkpoint_directory.h"

namespace penstock::internal {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

[[noreturn]] void fail(const std::string& path, const std::string& problem) {
  throw WeightsError(concat(path, ": ", problem));
}

void read_file(const std::string& path, std::map<std::string, at::Tensor>& tensors) {
  for (auto& [name, tensor] : read_safetensors(path, FileAccess::MapReadOnly)) tensors.emplace(name, std::move(tensor));
}

// Returns the type of a file. Throws WeightsError when the system cannot tell.
fs::file_type type_of(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::status_known(status)) fail(path.string(), concat("could not be read: ", error.message(), "."));
  return status.type();
}

bool path_exists(const fs::path& path) {
  return type_of(path) != fs::file_type::not_found;
}

// Returns the tensor names of each shard file.
std::map<std::string, std::vector<std::string>> read_index(const std::string& path) {
  const json index = try_parse_json(MappedFile(path).bytes()).value_or(json());
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail(path, "is not an index of weights: expected JSON with a \"weight_map\" from tensor names to file names.");
  }
  std::map<std::string, std::vector<std::string>> names_by_file;
  for (const auto& [name, file] : index["weight_map"].items()) {
    const bool is_plain_name =
        file.is_string() && !file.get_ref<const std::string&>().empty() &&
        fs::path(file.get_ref<const std::string&>()).filename() == file.get_ref<const std::string&>();
    if (!is_plain_name) {
      fail(path, concat(quoted_tensor(name), " should be in a file of the same directory; found ", file.dump(), "."));
    }
    names_by_file[file.get<std::string>()].push_back(name);
  }
  return names_by_file;
}

void read_shards(const fs::path& directory, std::map<std::string, at::Tensor>& tensors) {
  const std::string index = (directory / kIndex).string();
  for (const auto& [file, names] : read_index(index)) {
    const SafetensorsFile shard((directory / file).string(), FileAccess::MapReadOnly);
    for (const std::string& name : names) {
      if (!shard.contains(name)) {
        fail(index, concat(quoted_tensor(name), " is not in ", file, ", which the index names for it."));
      }
      tensors.emplace(name, shard.tensor(name));
    }
  }
}

}  // namespace

WeightFiles read_weight_files(const std::string& path) {
  const fs::file_type type = type_of(path);
  if (type == fs::file_type::not_found) fail(path, "there is no such file or directory.");
  WeightFiles files{.path = path};
  try {
    if (type != fs::file_type::directory) {
      read_file(path, files.tensors);
    } else if (is_checkpoint(path) || last_checkpoint(path)) {
      const Checkpoint checkpoint(path);
      files = {.path = checkpoint.path(), .tensors = checkpoint.weights(), .checkpoint = checkpoint.info()};
    } else if (path_exists(fs::path(path) / kIndex)) {
      read_shards(path, files.tensors);
    } else if (path_exists(fs::path(path) / kSingle)) {
      read_file((fs::path(path) / kSingle).string(), files.tensors);
    } else {
      fail(
          path,
          concat("has no weights: neither a checkpoint of Penstock, nor ", kSingle, " or ", kIndex,
                 ".\n  Hint: in Python, model.save_pretrained(DIRECTORY) or safetensors.torch.save_file writes them."));
    }
  } catch (const SafetensorsError& error) {
    throw WeightsError(error.what());
  } catch (const MappingError& failure) {
    throw WeightsError(failure.what());
  }
  return files;
}

std::uint32_t checksum_of(const WeightFiles& weights) {
  std::uint64_t checksum = 0;
  for (const auto& [name, tensor] : weights.tensors) {
    const at::Tensor bytes = tensor.contiguous();
    checksum = crc32_z(checksum, reinterpret_cast<const Bytef*>(name.data()), name.size());
    checksum = crc32_z(checksum, static_cast<const Bytef*>(bytes.const_data_ptr()), bytes.nbytes());
    release_pages(tensor);
  }
  return static_cast<std::uint32_t>(checksum);
}

}  // namespace penstock::internal
