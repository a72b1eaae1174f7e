// The two passes of attention over a plan, below autograd. Work is shared among the threads of the caller, unless there
// is a score_mod, which is only ever called on the caller's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "penstock/tensor/attention.h"
#include "penstock/tensor/attention/plan.h"

namespace penstock::internal {

struct AttentionProblem {
  // All of the type that is computed in, and without autograd.
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  double scale = 1;
  const ScoreMod& score_mod;
  const AttentionPlan& plan;
};

struct AttentionOutput {
  at::Tensor out;
  // log Σ exp(score) of each query, [batch, heads, queries]; +∞ for one with nothing to attend to.
  at::Tensor log_sum;
};

AttentionOutput attention_forward(const AttentionProblem& problem);

struct AttentionGradients {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  std::vector<at::Tensor> captured;
};

// Gradients that are not wanted, of query, key and value, stay undefined; so do those of captured tensors that need
// none.
AttentionGradients attention_backward(const AttentionProblem& problem, const AttentionOutput& output,
                                      const at::Tensor& grad_out, at::TensorList captured, std::array<bool, 3> wanted);

}  // namespace penstock::internal
