// Attention that visits only the blocks which a mask allows, with scores modified by a function of ours, forward and
// backward, on the CPU. Scores exist for a strip of 64 queries and 512 keys at a time; the backward computes them
// again, so that memory grows with the length of the sequence and not with its square.
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

// Gives the modified scores of some queries and keys of one batch row and head. `score` is [1, 1, queries, keys], in
// float32 or float64, scaled and not yet masked; the indices are int64 tensors that broadcast against it. It may be
// called for any part of the scores, once in the forward and again in the backward, and must give the same both times
// and leave `score` as it is.
using ScoreMod = std::function<at::Tensor(const at::Tensor& score, const at::Tensor& b, const at::Tensor& h,
                                          const at::Tensor& q_idx, const at::Tensor& kv_idx)>;

// Arguments that do not fit each other. The message says what was found and what would be right.
class AttentionError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// softmax(score_mod(scale * query · keyᵀ), where block_mask allows) · value.
//
// query [batch, heads, queries, E], key [batch, heads, keys, E], value [batch, heads, keys, Ev], all float32, float64
// or bfloat16 (computed in float32), with any strides. The result has query's type and is [batch, heads, queries, Ev];
// a query with nothing to attend to gives zeros. Key and value may have batch 1. With enable_gqa they may have fewer
// heads, each for as many successive heads of the query. The scale is 1/√E unless given.
//
// Tensors that score_mod has captured and that need gradients are named in `captured`.
//
// Throws AttentionError, also for a score_mod that gives something else than scores or that needs gradients for a
// tensor that is not named; and what score_mod and the mask's function throw. The result can be differentiated once.
at::Tensor flex_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ScoreMod& score_mod = nullptr,
                          const std::optional<BlockMask>& block_mask = std::nullopt,
                          std::optional<double> scale = std::nullopt, bool enable_gqa = false,
                          at::TensorList captured = {});

}  // namespace penstock
