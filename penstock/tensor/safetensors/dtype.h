// The dtypes of safetensors files.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::internal {

struct SafetensorsDtype {
  // Name in a file, such as "F32".
  std::string_view code;
  c10::ScalarType type;
  // Name in Python, such as "float32".
  std::string_view name;
  std::size_t element_bytes;
  // Number of values in the file's shape that form one torch element.
  std::int64_t packed = 1;
};

// Find the dtype with a file's code or with a torch type. Return null if safetensors do not have it. Pointers are
// ordered as the Python package orders dtypes, by which its writer sorts.
const SafetensorsDtype* find_safetensors_dtype(std::string_view code);
const SafetensorsDtype* find_safetensors_dtype(c10::ScalarType type);

// Return a hint that lists the codes, or the Python names, of all dtypes.
std::string safetensors_code_hint();
std::string safetensors_name_hint();

// Returns the number of bytes that a tensor takes, or nothing if a file cannot have that many. The other dimensions of
// an empty tensor count too, as torch multiplies them for its strides.
std::optional<std::size_t> tensor_bytes(const SafetensorsDtype& dtype, const std::vector<std::int64_t>& shape);

}  // namespace penstock::internal
