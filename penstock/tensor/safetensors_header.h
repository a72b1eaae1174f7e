// The header of a safetensors file: which tensors are in it, of what dtype and shape, and where their bytes lie. Here
// it is read from memory and checked, or laid out and written; the tensors themselves are safetensors.h's.
//
//   8 bytes    the length of the header, little-endian
//   header     {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
//   data       the tensors' bytes
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

// A file that is no safetensors file or cannot be read or written, or a tensor that such a file cannot hold. The
// message names the file and the tensor, what was found and what would be right.
class SafetensorsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  // As torch has it. A file counts the values of a float4_e2m1fn_x2, of which an element is two.
  std::vector<std::int64_t> shape;
  // Its bytes, counted from where the data begins.
  std::size_t begin = 0;
  std::size_t end = 0;

  bool operator==(const SafetensorsEntry&) const = default;
};

struct SafetensorsHeader {
  // In the order of their bytes, which follow one another without a gap.
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  // Where in the file the data begins; 0 for one that is not read from a file.
  std::size_t data_begin = 0;

  bool operator==(const SafetensorsHeader&) const = default;
};

// The header at the beginning of `file`, the bytes of a whole file. After this every entry's bytes lie within the file,
// are as many as its dtype and shape take, and are no other entry's. Of the file, only the header is read.
// Throws SafetensorsError, which begins with `source`. More is refused than by the Python package: names that are there
// twice, unknown fields, and a header that does not begin with '{'.
SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source);

// Entries with a name, dtype and shape, brought into the order of the Python package's writer and given their bytes. By
// that order no tensor is followed by one of wider elements, so each lies at a multiple of its element's size.
// Throws SafetensorsError for a name or a tensor that cannot be in a file.
SafetensorsHeader lay_out_safetensors(std::vector<SafetensorsEntry> entries,
                                      std::map<std::string, std::string> metadata, const std::string& source);

// The bytes of a file up to its data, filled with spaces to a multiple of 8.
std::string to_bytes(const SafetensorsHeader& header, const std::string& source);

// The size of an element of a dtype that a header can have.
std::size_t safetensors_element_size(c10::ScalarType dtype);

// For errors: tensor 'w', with what cannot be printed escaped and what is too long cut off.
std::string tensor_text(std::string_view name);

}  // namespace penstock::internal
