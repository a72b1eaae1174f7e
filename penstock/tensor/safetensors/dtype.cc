#include "penstock/tensor/safetensors/dtype.h"

#include <algorithm>
#include <array>
#include <limits>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

using c10::ScalarType;

// Sorted as in the Python package.
constexpr std::array<SafetensorsDtype, 20> kDtypes = {{
    {"BOOL", ScalarType::Bool, "bool", 1},
    {"F4", ScalarType::Float4_e2m1fn_x2, "float4_e2m1fn_x2", 1, 2},
    {"U8", ScalarType::Byte, "uint8", 1},
    {"I8", ScalarType::Char, "int8", 1},
    {"F8_E5M2", ScalarType::Float8_e5m2, "float8_e5m2", 1},
    {"F8_E4M3", ScalarType::Float8_e4m3fn, "float8_e4m3fn", 1},
    {"F8_E8M0", ScalarType::Float8_e8m0fnu, "float8_e8m0fnu", 1},
    {"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz, "float8_e4m3fnuz", 1},
    {"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz, "float8_e5m2fnuz", 1},
    {"I16", ScalarType::Short, "int16", 2},
    {"U16", ScalarType::UInt16, "uint16", 2},
    {"F16", ScalarType::Half, "float16", 2},
    {"BF16", ScalarType::BFloat16, "bfloat16", 2},
    {"I32", ScalarType::Int, "int32", 4},
    {"U32", ScalarType::UInt32, "uint32", 4},
    {"F32", ScalarType::Float, "float32", 4},
    {"C64", ScalarType::ComplexFloat, "complex64", 8},
    {"F64", ScalarType::Double, "float64", 8},
    {"I64", ScalarType::Long, "int64", 8},
    {"U64", ScalarType::UInt64, "uint64", 8},
}};

template <class Predicate>
const SafetensorsDtype* find(const Predicate& predicate) {
  const auto* const found = std::find_if(kDtypes.begin(), kDtypes.end(), predicate);
  return found == kDtypes.end() ? nullptr : found;
}

std::string hint(std::string_view SafetensorsDtype::* column) {
  std::vector<std::string_view> names;
  for (const SafetensorsDtype& dtype : kDtypes) names.push_back(dtype.*column);
  return concat("\n  Hint: the dtypes are ", join(names), ".");
}

}  // namespace

const SafetensorsDtype* find_safetensors_dtype(std::string_view code) {
  return find([&](const SafetensorsDtype& dtype) { return dtype.code == code; });
}

const SafetensorsDtype* find_safetensors_dtype(ScalarType type) {
  return find([&](const SafetensorsDtype& dtype) { return dtype.type == type; });
}

std::string safetensors_code_hint() {
  return hint(&SafetensorsDtype::code);
}

std::string safetensors_name_hint() {
  return hint(&SafetensorsDtype::name);
}

std::optional<std::size_t> tensor_bytes(const SafetensorsDtype& dtype, const std::vector<std::int64_t>& shape) {
  const auto limit = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max() / dtype.packed);
  std::size_t bytes = dtype.element_bytes;
  bool is_empty = false;
  for (const std::int64_t size : shape) {
    is_empty = is_empty || size == 0;
    const auto factor = static_cast<std::size_t>(std::max<std::int64_t>(size, 1));
    if (bytes > limit / factor) return std::nullopt;
    bytes *= factor;
  }
  return is_empty ? 0 : bytes;
}

}  // namespace penstock::internal
