// The rules that splitting into chunks and merging share.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "penstock/base/text.h"
#include "penstock/tensor/chunk_spec.h"

namespace penstock::internal {

// The indices of a dimension that belong to a chunk.
struct ChunkRange {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

// Returns the range of chunk `index` of `count`. The first size % count chunks are longer by one.
inline ChunkRange chunk_range(std::int64_t size, std::int64_t count, std::int64_t index) {
  return {.begin = index * (size / count) + std::min(index, size % count),
          .length = size / count + (index < size % count ? 1 : 0)};
}

inline bool is_defined_tensor(const c10::IValue& leaf) {
  return leaf.isTensor() && leaf.toTensor().defined();
}

// Returns the error for a block mask with a spec for another dimension than its batch.
inline std::string mask_dimension_error(const TensorChunkSpec& spec) {
  return concat("a block mask is split along dimension 0, its batch, not along ", spec.split_dim, ".");
}

}  // namespace penstock::internal
