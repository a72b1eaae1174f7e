#include "penstock/tensor/attention/score_mod_caller.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/arange.h>

#include <array>
#include <string>

#include "penstock/base/text.h"

namespace penstock::internal {

ScoreModCaller::ScoreModCaller(const AttentionProblem& problem)
    : score_mod_(problem.score_mod),
      b_(at::arange(problem.query.size(0), at::kLong)),
      h_(at::arange(problem.query.size(1), at::kLong)),
      q_(at::arange(problem.query.size(2), at::kLong)),
      kv_(at::arange(problem.key.size(2), at::kLong)) {}

at::Tensor ScoreModCaller::call(const at::Tensor& scores, std::int64_t batch, std::int64_t head,
                                const AttentionPlan::Strip& strip, const AttentionPlan::Run& run) const {
  const at::Tensor modified = score_mod_(scores.unsqueeze(0).unsqueeze(0), b_.narrow(0, batch, 1).view({1, 1, 1, 1}),
                                         h_.narrow(0, head, 1).view({1, 1, 1, 1}),
                                         q_.narrow(0, strip.first_row, strip.rows).view({1, 1, -1, 1}),
                                         kv_.narrow(0, run.first_key, run.keys).view({1, 1, 1, -1}));
  const std::array<std::int64_t, 4> shape = {1, 1, strip.rows, run.keys};
  std::string found;
  if (!modified.defined()) {
    found = "an undefined tensor";
  } else if (!modified.is_floating_point()) {
    found = concat("a tensor of ", c10::toString(modified.scalar_type()));
  } else if (!at::is_expandable_to(modified.sizes(), shape)) {
    found = concat("a tensor of shape ", shape_text(modified.sizes()));
  } else {
    return modified.to(scores.scalar_type()).expand(shape).select(0, 0).select(0, 0);
  }
  throw AttentionError(concat("flex_attention: score_mod returned ", found, " for scores of shape ", shape_text(shape),
                              "; it should return real numbers of that shape."));
}

}  // namespace penstock::internal
