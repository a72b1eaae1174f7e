// Mask functions, which decide which queries may attend to which keys. A MaskMod is called on int64 tensors of indices
// that broadcast against each other, in the order batch, head, query, key, and returns a bool tensor that broadcasts to
// all four.
//
//   MaskMod causal = [](const at::Tensor&, const at::Tensor&, const at::Tensor& q, const at::Tensor& kv) {
//     return q >= kv;
//   };
//   MaskMod documents = [ids](const at::Tensor& b, const at::Tensor&, const at::Tensor& q, const at::Tensor& kv) {
//     return ids.index({b, q}) == ids.index({b, kv});
//   };
//   MaskMod both = and_masks({causal, documents});
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <stdexcept>
#include <vector>

namespace penstock {

using MaskMod = std::function<at::Tensor(const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                                         const at::Tensor& kv_idx)>;

// Thrown when a mask cannot be created, evaluated, split or merged. The message says what was found and what was
// expected.
class BlockMaskError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Allows every query to attend to every key.
at::Tensor noop_mask(const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx, const at::Tensor& kv_idx);

// Return a function that allows what all of `mask_mods` allow, or what any of them allows. Throw BlockMaskError if one
// of them is an empty std::function.
MaskMod and_masks(std::vector<MaskMod> mask_mods);
MaskMod or_masks(std::vector<MaskMod> mask_mods);

// Calls mask_mod on one-dimensional indices. The result has four dimensions; those that it does not depend on have size
// 1. Throws BlockMaskError if mask_mod does not return a bool tensor that broadcasts to the four.
at::Tensor evaluate_mask_mod(const MaskMod& mask_mod, const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                             const at::Tensor& kv_idx);

// Returns the dense mask, bool [batch, heads, q_len, kv_len].
at::Tensor create_mask(const MaskMod& mask_mod, std::int64_t batch, std::int64_t heads, std::int64_t q_len,
                       std::int64_t kv_len, at::Device device = at::kCPU);

}  // namespace penstock
