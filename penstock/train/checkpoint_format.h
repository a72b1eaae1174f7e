// File names, checksums and error handling that writing, reading and listing checkpoints have in common. Included by
// the checkpoint sources only; checkpoint.h describes the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "penstock/base/text.h"
#include "penstock/tensor/atomic_file_writer.h"
#include "penstock/tensor/mapped_file.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/train/checkpoint_info.h"

namespace penstock::internal::checkpoint_format {

inline constexpr const char* kFormat = "penstock checkpoint";
inline constexpr int kVersion = 3;
inline constexpr const char* kManifest = "manifest.json";
// Key of the manifest's own CRC-32.
inline constexpr const char* kChecksum = "crc32";
// Prefixes of the directories of finished checkpoints, of those that are being written, and of those that are being
// removed.
inline constexpr std::string_view kFinished = "step-";
inline constexpr std::string_view kUnfinished = ".unfinished-";
inline constexpr std::string_view kRemoved = ".removed-";

// Throws CheckpointError with "PATH: PROBLEM".
[[noreturn]] void fail(const std::string& path, const std::string& problem);
[[noreturn]] void fail_to_read(const std::filesystem::path& path, const std::error_code& error);

// Returns the result of `function`, which accesses files. Its errors become CheckpointError; those of std::filesystem
// read "PATH: could not be written: REASON." where `verb` is "written".
template <class Function>
auto with_checkpoint_errors(const std::string& path, const std::string& verb, Function function) {
  try {
    return function();
  } catch (const std::filesystem::filesystem_error& error) {
    fail(error.path1().empty() ? path : error.path1().string(),
         concat("could not be ", verb, ": ", error.code().message(), "."));
  } catch (const AtomicFileWriter::Error& error) {
    throw CheckpointError(error.what());
  } catch (const SafetensorsError& error) {
    throw CheckpointError(error.what());
  } catch (const MappingError& error) {
    throw CheckpointError(error.what());
  }
}

// Returns true if the path exists. Throws CheckpointError when the system cannot tell.
bool path_exists(const std::filesystem::path& path);

// Returns the name, size and CRC-32 of a file, as the manifest lists them. Throws MappingError.
nlohmann::json file_entry(const std::filesystem::path& file);

// Returns the CRC-32 of a manifest, computed without its kChecksum entry.
std::uint64_t checksum_of(nlohmann::json manifest);

// Returns the JSON value of a file, or none if the file is not JSON or the value has another type. Throws
// CheckpointError for a file that cannot be read.
std::optional<nlohmann::json> try_read_json(const std::string& path, nlohmann::json::value_t type);
// Like try_read_json, but throws CheckpointError in place of returning none.
nlohmann::json read_json(const std::string& path, nlohmann::json::value_t type = nlohmann::json::value_t::object);

// Returns the run id of a finished checkpoint, or none if its manifest is damaged.
std::optional<std::string> run_of(const std::filesystem::path& checkpoint);

}  // namespace penstock::internal::checkpoint_format
