// Attention on the CPU that visits only the blocks which a mask allows, with scores modified by a function of the user,
// forward and backward. Scores exist for 64 queries and 512 keys at a time, and the backward recomputes them, so that
// memory grows linearly with the sequence length.
//
//   ScoreMod soft_cap = [](const at::Tensor& score, const at::Tensor&, const at::Tensor&, const at::Tensor&,
//                          const at::Tensor&) { return 20 * at::tanh(score / 20); };
//   at::Tensor out = flex_attention(query, key, value, soft_cap, create_block_mask(causal, {}, {}, 2048, 2048));
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <stdexcept>

#include "penstock/tensor/block_mask.h"

namespace penstock {

// Returns the modified scores of some queries and keys of one batch row and head. `score` is [1, 1, queries, keys], in
// float32 or float64, scaled and not yet masked; the indices are int64 tensors that broadcast against it. The function
// is called for any part of the scores, once in the forward and again in the backward. It must return the same values
// both times and must not modify `score`.
using ScoreMod = std::function<at::Tensor(const at::Tensor& score, const at::Tensor& b, const at::Tensor& h,
                                          const at::Tensor& q_idx, const at::Tensor& kv_idx)>;

// Thrown for arguments that do not fit each other. The message says what was found and what was expected.
class AttentionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns softmax(score_mod(scale * query · keyᵀ), where block_mask allows) · value, like torch.nn.attention's function
// of the same name.
//
// query is [batch, heads, queries, E], key [batch, heads, keys, E], value [batch, heads, keys, Ev], all float32,
// float64 or bfloat16 (computed in float32), with any strides. The result has query's dtype and is [batch, heads,
// queries, Ev]; a query that attends to nothing has zeros. Key and value may have batch 1. With enable_gqa they may
// have fewer heads, each shared by a group of successive query heads. The scale is 1/√E by default.
//
// `captured` lists the tensors that score_mod has captured and that require grad.
//
// Throws AttentionError for arguments that do not fit, for a score_mod that does not return scores, and for one that
// uses a tensor which requires grad and is not in `captured`; also what score_mod and the mask function throw. The
// result can be differentiated once.
at::Tensor flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ScoreMod& score_mod = nullptr,
                          const std::optional<BlockMask>& block_mask = std::nullopt,
                          std::optional<double> scale = std::nullopt, bool enable_gqa = false,
                          at::TensorList captured = {});

}  // namespace penstock
