// Fuzzes binary metadata: any bytes are metadata or an error. Metadata survives a round trip through its own bytes, has
// a size and a stride for each dimension, and can be printed and compared.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <vector>

#include "penstock/tensor/metadata.h"

namespace penstock::internal::testing {
namespace {

void try_bytes(std::string_view bytes) {
  const std::vector<std::optional<TensorMeta>> metas = decode_metadata(bytes);
  if (decode_metadata(encode_metadata(metas)) != metas) std::abort();
  validate_tensors_metadata("fuzzed", metas, metas);
  for (const std::optional<TensorMeta>& meta : metas) {
    if (!meta) continue;
    if (meta->shape.size() != meta->strides.size()) std::abort();
    for (const std::int64_t size : meta->shape) {
      if (size < 0) std::abort();
    }
    if (to_string(*meta).empty()) std::abort();
  }
}

}  // namespace
}  // namespace penstock::internal::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    penstock::internal::testing::try_bytes({reinterpret_cast<const char*>(data), size});
  } catch (const penstock::PipeliningShapeError&) {
    return 0;
  }
  return 0;
}
