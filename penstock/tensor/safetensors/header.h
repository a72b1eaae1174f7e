// The header of a safetensors file: names, dtypes and shapes of its tensors, and where their bytes lie. This file reads
// and checks a header in memory, or lays one out and writes it; safetensors.h reads and writes the tensors themselves.
//
//   8 bytes    the length of the header, little-endian
//   header     {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
//   data       the tensors' bytes
//
// All functions throw SafetensorsError with a message that begins with `source`, the path of the file.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/tensor/safetensors.h"

namespace penstock::internal {

inline constexpr std::size_t kLengthBytes = 8;
inline constexpr std::size_t kMaxHeaderBytes = 100'000'000;
inline constexpr const char* kMetadataKey = "__metadata__";

struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  // Shape of the torch tensor. The header of a float4_e2m1fn_x2 tensor counts values instead, two for each element.
  std::vector<std::int64_t> shape;
  // Range of the tensor's bytes, relative to the beginning of the data.
  std::size_t begin = 0;
  std::size_t end = 0;

  bool operator==(const SafetensorsEntry&) const = default;
};

struct SafetensorsHeader {
  // Sorted by their byte ranges, which are adjacent.
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  // Offset of the data in the file; 0 for a header that was not read from a file.
  std::size_t data_begin = 0;

  bool operator==(const SafetensorsHeader&) const = default;
};

// Throws the error of a file.
template <TextPart... Parts>
[[noreturn]] void fail_safetensors(const std::string& source, const Parts&... problem) {
  throw SafetensorsError(concat(source, ": ", problem...));
}

// Parses the header at the beginning of `file`, the bytes of a whole file, of which only the header is read. Guarantees
// that the byte ranges of entries lie within the file, do not overlap, and have the sizes that dtypes and shapes need.
// Stricter than the Python package: refuses duplicate names, unknown fields, and a header that does not begin with '{'.
SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source);

// Sorts entries that have a name, dtype and shape as the Python package's writer does, and assigns their byte ranges.
// In this order no tensor is followed by one with wider elements, so that each is aligned to its element size.
SafetensorsHeader lay_out_safetensors(std::vector<SafetensorsEntry> entries,
                                      std::map<std::string, std::string> metadata, const std::string& source);

// Returns the bytes of a file up to its data, padded with spaces to a multiple of 8.
std::string to_bytes(const SafetensorsHeader& header, const std::string& source);

}  // namespace penstock::internal
