// A MaskMod says which queries may attend to which keys. It is called on int64 tensors of indices that broadcast
// against each other, in the order batch, head, query, key, and answers with a bool tensor that broadcasts to all four.
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

// A mask that cannot be made, split, merged or asked. The message says what was found and what would be right.
class BlockMaskError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Every query may attend to every key.
at::Tensor noop_mask(const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx, const at::Tensor& kv_idx);

// What all of them allow, and what any of them allows. Throws BlockMaskError when one of them is empty.
MaskMod and_masks(std::vector<MaskMod> mask_mods);
MaskMod or_masks(std::vector<MaskMod> mask_mods);

// Calls mask_mod on one-dimensional indices. The answer has four dimensions, of which those are 1 that it does not
// depend on. Throws BlockMaskError when it is no bool tensor, or does not broadcast to the four.
at::Tensor ask_mask_mod(const MaskMod& mask_mod, const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                        const at::Tensor& kv_idx);

// The whole mask, bool [batch, heads, q_len, kv_len].
at::Tensor create_mask(const MaskMod& mask_mod, std::int64_t batch, std::int64_t heads, std::int64_t q_len,
                       std::int64_t kv_len, at::Device device = at::kCPU);

}  // namespace penstock
