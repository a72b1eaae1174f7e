#include "penstock/train/checkpoint_format.h"

#include <zlib.h>

#include <utility>

#include "penstock/schedule/json.h"

namespace penstock::internal::checkpoint_format {

namespace fs = std::filesystem;
using nlohmann::json;

void fail(const std::string& path, const std::string& problem) {
  throw CheckpointError(concat(path, ": ", problem));
}

void fail_to_read(const fs::path& path, const std::error_code& error) {
  fail(path.string(), concat("could not be read: ", error.message(), "."));
}

bool path_exists(const fs::path& path) {
  std::error_code error;
  const bool found = fs::exists(path, error);
  if (error) fail_to_read(path, error);
  return found;
}

json file_entry(const fs::path& file) {
  const MappedFile mapped(file.string());
  const std::string_view bytes = mapped.bytes();
  return {{"name", file.filename().string()},
          {"bytes", bytes.size()},
          {"crc32", crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size())}};
}

std::uint64_t checksum_of(json manifest) {
  manifest.erase(kChecksum);
  const std::string text = manifest.dump();
  return crc32_z(0, reinterpret_cast<const Bytef*>(text.data()), text.size());
}

std::optional<json> try_read_json(const std::string& path, json::value_t type) {
  try {
    std::optional<json> parsed = try_parse_json(MappedFile(path).bytes());
    if (!parsed || parsed->type() != type) return std::nullopt;
    return parsed;
  } catch (const MappingError& failure) {
    throw CheckpointError(failure.what());
  }
}

json read_json(const std::string& path, json::value_t type) {
  std::optional<json> parsed = try_read_json(path, type);
  if (!parsed) fail(path, "is damaged: it is not JSON.");
  return *std::move(parsed);
}

std::optional<std::string> run_of(const fs::path& checkpoint) {
  const std::optional<json> manifest = try_read_json((checkpoint / kManifest).string(), json::value_t::object);
  if (!manifest || !manifest->value("run", json()).is_string()) return std::nullopt;
  return manifest->at("run").get<std::string>();
}

}  // namespace penstock::internal::checkpoint_format
