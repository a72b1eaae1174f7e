#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include "penstock/tensor/attention/pass.h"
#include "penstock/tensor/attention/rows.h"
#include "penstock/tensor/attention/score_mod_caller.h"
#include "penstock/tensor/attention/strip.h"

namespace penstock::internal {
namespace {

using Run = AttentionPlan::Run;
using Strip = AttentionPlan::Strip;

// Computes heads one after the other, each with an online softmax over the runs of a strip. Used by one thread.
template <class Real>
class Forward {
 public:
  Forward(const AttentionProblem& problem, AttentionOutput& output)
      : problem_(problem), output_(output), scratch_(problem.query.options()) {
    if (problem.score_mod) caller_.emplace(problem);
  }

  void head(std::int64_t batch, std::int64_t head, std::span<const Strip> strips) {
    const std::int64_t group = problem_.query.size(1) / problem_.key.size(1);
    const at::Tensor query = head_of(problem_.query, batch, head);
    const at::Tensor key = head_of(problem_.key, batch, head / group);
    const at::Tensor value = head_of(problem_.value, batch, head / group);
    const at::Tensor out = head_of(output_.out, batch, head);
    Real* const logsumexp = head_of(output_.logsumexp, batch, head).template mutable_data_ptr<Real>();
    for (const Strip& strip : strips) {
      std::fill_n(maximum_, strip.rows, -std::numeric_limits<Real>::infinity());
      std::fill_n(sum_, strip.rows, Real{0});
      const at::Tensor queries = query.narrow(0, strip.first_row, strip.rows);
      const at::Tensor results = out.narrow(0, strip.first_row, strip.rows);
      bool is_first = true;
      for (const Run& run : problem_.plan.runs(strip)) {
        const at::Tensor scores = scratch_.view(strip, run);
        add_product(scores, queries, key.narrow(0, run.first_key, run.keys).t(), 0, problem_.scale);
        if (caller_) scores.copy_(caller_->call(scores, batch, head, strip, run));
        mask_parts(problem_.plan, run, scratch_.rows(strip, run));
        online_softmax_step(scratch_.rows(strip, run), maximum_, sum_, rescale_);
        if (!is_first) scale_rows(results, [this](std::int64_t row) { return rescale_[row]; });
        add_product(results, scores, value.narrow(0, run.first_key, run.keys), is_first ? 0 : 1);
        is_first = false;
      }
      finish(strip, results, logsumexp + strip.first_row);
    }
  }

 private:
  template <class Factor>
  static void scale_rows(const at::Tensor& results, const Factor& factor) {
    const std::int64_t columns = results.size(1);
    Real* const data = results.mutable_data_ptr<Real>();
    for (std::int64_t row = 0; row < results.size(0); ++row) {
      const Real by = factor(row);
      if (by == 1) continue;
      for (std::int64_t column = 0; column < columns; ++column) data[row * columns + column] *= by;
    }
  }

  void finish(const Strip& strip, const at::Tensor& results, Real* logsumexp) {
    // A strip without runs has not written its results; a row with sum 0 has only zeros.
    if (strip.runs == 0) std::fill_n(results.template mutable_data_ptr<Real>(), results.numel(), Real{0});
    scale_rows(results, [this](std::int64_t row) { return sum_[row] == 0 ? Real{1} : 1 / sum_[row]; });
    for (std::int64_t row = 0; row < strip.rows; ++row) {
      logsumexp[row] = sum_[row] == 0 ? std::numeric_limits<Real>::infinity() : maximum_[row] + std::log(sum_[row]);
    }
  }

  const AttentionProblem& problem_;
  AttentionOutput& output_;
  Scratch<Real> scratch_;
  std::optional<ScoreModCaller> caller_;
  Real maximum_[AttentionPlan::kMaxRows] = {};
  Real sum_[AttentionPlan::kMaxRows] = {};
  Real rescale_[AttentionPlan::kMaxRows] = {};
};

template <class Real>
void forward(const AttentionProblem& problem, AttentionOutput& output) {
  const std::int64_t heads = problem.query.size(1);
  const auto strips = static_cast<std::int64_t>(problem.plan.strips(0, 0).size());
  parallel_work(problem, problem.query.size(0) * heads * strips, [&](std::int64_t begin, std::int64_t end) {
    Forward<Real> pass(problem, output);
    while (begin < end) {
      const std::int64_t head = begin / strips;
      const std::int64_t first = begin % strips;
      const std::int64_t count = std::min(strips - first, end - begin);
      pass.head(head / heads, head % heads,
                problem.plan.strips(head / heads, head % heads)
                    .subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)));
      begin += count;
    }
  });
}

}  // namespace

AttentionOutput attention_forward(const AttentionProblem& problem) {
  const at::IntArrayRef sizes = problem.query.sizes();
  AttentionOutput output = {
      .out = at::empty({sizes[0], sizes[1], sizes[2], problem.value.size(3)}, problem.query.options()),
      .logsumexp = at::empty({sizes[0], sizes[1], sizes[2]}, problem.query.options())};
  if (output.logsumexp.numel() == 0) return output;
  if (problem.query.scalar_type() == at::kDouble) {
    forward<double>(problem, output);
  } else {
    forward<float>(problem, output);
  }
  return output;
}

}  // namespace penstock::internal
