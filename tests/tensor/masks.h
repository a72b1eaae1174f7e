// Fixtures for the tests of block masks and attention: mask functions, random masks, PyTorch's cases, checks of errors.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "penstock/tensor/block_mask.h"
#include "tests/tensor/pickled.h"

namespace penstock::internal::testing {

inline at::Tensor causal(const at::Tensor& /*b*/, const at::Tensor& /*h*/, const at::Tensor& q, const at::Tensor& kv) {
  return q >= kv;
}

inline MaskMod window(std::int64_t width) {
  return [width](const at::Tensor& /*b*/, const at::Tensor& /*h*/, const at::Tensor& q, const at::Tensor& kv) {
    return (q >= kv).logical_and(q - kv < width);
  };
}

// Allows pairs within a document, given by ids [batch, length].
inline MaskMod documents(const at::Tensor& ids) {
  return [ids](const at::Tensor& b, const at::Tensor& /*h*/, const at::Tensor& q, const at::Tensor& kv) {
    return ids.index({b, q}) == ids.index({b, kv});
  };
}

// Allows the pairs of a dense mask [batch, heads, queries, keys].
inline MaskMod looked_up(const at::Tensor& allowed) {
  return [allowed](const at::Tensor& b, const at::Tensor& h, const at::Tensor& q, const at::Tensor& kv) {
    return allowed.index({b, h, q, kv});
  };
}

// Returns a dense mask with blocks that are empty, full or random.
inline at::Tensor patchwork(std::int64_t batch, std::int64_t heads, std::int64_t q_len, std::int64_t kv_len,
                            std::int64_t block) {
  const at::Tensor kind = at::randint(0, 3, {batch, heads, (q_len + block - 1) / block, (kv_len + block - 1) / block})
                              .repeat_interleave(block, 2)
                              .repeat_interleave(block, 3)
                              .narrow(2, 0, q_len)
                              .narrow(3, 0, kv_len);
  return (kind == 2).logical_or((kind == 1).logical_and(at::rand(kind.sizes()) < 0.5));
}

// Returns the block mask of a dense mask.
inline BlockMask mask_of(const at::Tensor& allowed, BlockSize block) {
  return create_block_mask(looked_up(allowed), allowed.size(0), allowed.size(1), allowed.size(2), allowed.size(3),
                           block);
}

inline ::testing::AssertionResult same_tensor(const at::Tensor& expected, const at::Tensor& found) {
  if (expected.defined() && found.defined() && expected.scalar_type() == found.scalar_type() &&
      expected.sizes() == found.sizes() && at::equal(expected, found)) {
    return ::testing::AssertionSuccess();
  }
  std::ostringstream text;
  text << "expected " << expected << "\nfound " << found;
  return ::testing::AssertionFailure() << text.str();
}

// Returns the cases that attention_reference.py has written.
using Case = c10::Dict<c10::IValue, c10::IValue>;
inline std::vector<Case> reference_cases(const std::string& file) {
  std::vector<Case> cases;
  for (const c10::IValue& each : read_pickled("PENSTOCK_ATTENTION", file)) cases.push_back(each.toGenericDict());
  return cases;
}

}  // namespace penstock::internal::testing
