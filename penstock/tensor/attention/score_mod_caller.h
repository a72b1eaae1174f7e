// Calls a user's score_mod on parts of the scores.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "penstock/tensor/attention/pass.h"
#include "penstock/tensor/attention/plan.h"

namespace penstock::internal {

class ScoreModCaller {
 public:
  // `problem` must outlive the caller.
  explicit ScoreModCaller(const AttentionProblem& problem);

  // Returns the modified scores [rows, keys] of a strip and a run, in the dtype of `scores`. Throws AttentionError if
  // score_mod returns anything but real numbers of that shape.
  at::Tensor call(const at::Tensor& scores, std::int64_t batch, std::int64_t head, const AttentionPlan::Strip& strip,
                  const AttentionPlan::Run& run) const;

 private:
  const ScoreMod& score_mod_;
  // Indices of all batch rows, heads, queries and keys.
  at::Tensor b_;
  at::Tensor h_;
  at::Tensor q_;
  at::Tensor kv_;
};

}  // namespace penstock::internal
