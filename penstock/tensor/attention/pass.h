// The forward and the backward pass of attention over a plan, below autograd. Both run on the intra-op threads, unless
// there is a score_mod, which is only called on the calling thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "penstock/tensor/attention.h"
#include "penstock/tensor/attention/plan.h"

namespace penstock::internal {

struct AttentionProblem {
  // Detached, in the dtype of the computation.
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  double scale = 1;
  const ScoreMod& score_mod;
  const AttentionPlan& plan;
};

struct AttentionOutput {
  at::Tensor out;
  // log Σ exp(score) of each query, [batch, heads, queries]; +∞ for a query that attends to nothing.
  at::Tensor logsumexp;
};

AttentionOutput attention_forward(const AttentionProblem& problem);

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  std::vector<at::Tensor> captured;
};

// Computes the gradients of query, key and value as far as `wanted` asks for them, and of the captured tensors that
// require grad. The others stay undefined.
AttentionGradients attention_backward(const AttentionProblem& problem, const AttentionOutput& output,
                                      const at::Tensor& grad_out, at::TensorList captured, std::array<bool, 3> wanted);

}  // namespace penstock::internal
