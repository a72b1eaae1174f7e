#include "penstock/tensor/attention/pass.h"

#include <ATen/ExpandUtils.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "penstock/tensor/attention/rows.h"
#include "penstock/tensor/intra_op_threads.h"

namespace penstock::internal {
namespace {

using Run = AttentionPlan::Run;
using Strip = AttentionPlan::Strip;

// to = keep * to + factor * a · b. Below autograd, which threads of the pool know nothing of.
void add_product(const at::Tensor& to, const at::Tensor& a, const at::Tensor& b, double keep, double factor = 1) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.addmm_(a, b, keep, factor);
}

// One head of a batch row, [queries or keys, E].
at::Tensor head_of(const at::Tensor& tensor, std::int64_t batch, std::int64_t head) {
  return tensor.select(0, batch).select(0, head);
}

// Memory for the scores of a strip and a run.
template <class Real>
class Scratch {
 public:
  explicit Scratch(const at::TensorOptions& options)
      : memory_(at::empty({AttentionPlan::kMostRows, AttentionPlan::kMostKeys}, options)) {}

  at::Tensor view(const Strip& strip, const Run& run) const {
    return memory_.narrow(0, 0, strip.rows).narrow(1, 0, run.keys);
  }
  Real* data() const { return memory_.mutable_data_ptr<Real>(); }
  Rows<Real> rows(const Strip& strip, const Run& run) const {
    return {.data = data(), .rows = strip.rows, .columns = run.keys, .stride = AttentionPlan::kMostKeys};
  }

 private:
  static_assert(AttentionPlan::kMostKeys % kRowPadding == 0);
  at::Tensor memory_;
};

// Calls score_mod on parts of the scores.
class ScoreModCaller {
 public:
  explicit ScoreModCaller(const AttentionProblem& problem)
      : score_mod_(problem.score_mod),
        b_(at::arange(problem.query.size(0), at::kLong)),
        h_(at::arange(problem.query.size(1), at::kLong)),
        q_(at::arange(problem.query.size(2), at::kLong)),
        kv_(at::arange(problem.key.size(2), at::kLong)) {}

  // Modified scores [rows, keys], of the type of the scores.
  at::Tensor call(const at::Tensor& scores, std::int64_t batch, std::int64_t head, const Strip& strip,
                  const Run& run) const {
    const at::Tensor modified = score_mod_(scores.unsqueeze(0).unsqueeze(0), b_.narrow(0, batch, 1).view({1, 1, 1, 1}),
                                           h_.narrow(0, head, 1).view({1, 1, 1, 1}),
                                           q_.narrow(0, strip.first_row, strip.rows).view({1, 1, -1, 1}),
                                           kv_.narrow(0, run.first_key, run.keys).view({1, 1, 1, -1}));
    const std::int64_t whole[] = {1, 1, strip.rows, run.keys};
    std::ostringstream problem;
    if (!modified.defined()) {
      problem << "an undefined tensor";
    } else if (!modified.is_floating_point()) {
      problem << "a tensor of " << modified.scalar_type();
    } else if (!at::is_expandable_to(modified.sizes(), whole)) {
      problem << "a tensor of shape " << modified.sizes();
    } else {
      return modified.to(scores.scalar_type()).expand(whole).select(0, 0).select(0, 0);
    }
    problem << " for scores of shape " << at::IntArrayRef(whole);
    throw AttentionError("flex_attention: score_mod gave " + problem.str() +
                         "; it should give real numbers of that shape.");
  }

 private:
  const ScoreMod& score_mod_;
  at::Tensor b_;
  at::Tensor h_;
  at::Tensor q_;
  at::Tensor kv_;
};

template <class Real>
void mask_parts(const AttentionPlan& plan, const Run& run, Rows<Real> scores) {
  for (std::size_t i = 0; i < plan.parts(run); ++i) mask_scores(scores, plan.part(run, i));
}

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
    Real* const log_sum = head_of(output_.log_sum, batch, head).template mutable_data_ptr<Real>();
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
        softmax_step(scratch_.rows(strip, run), maximum_, sum_, rescale_);
        if (!is_first) scale_rows(results, [this](std::int64_t row) { return rescale_[row]; });
        add_product(results, scores, value.narrow(0, run.first_key, run.keys), is_first ? 0 : 1);
        is_first = false;
      }
      finish(strip, results, log_sum + strip.first_row);
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

  void finish(const Strip& strip, const at::Tensor& results, Real* log_sum) {
    // Without a run nothing was written; a sum of zero has only zeros before it.
    if (strip.runs == 0) std::fill_n(results.template mutable_data_ptr<Real>(), results.numel(), Real{0});
    scale_rows(results, [this](std::int64_t row) { return sum_[row] == 0 ? Real{1} : 1 / sum_[row]; });
    for (std::int64_t row = 0; row < strip.rows; ++row) {
      log_sum[row] = sum_[row] == 0 ? std::numeric_limits<Real>::infinity() : maximum_[row] + std::log(sum_[row]);
    }
  }

  const AttentionProblem& problem_;
  AttentionOutput& output_;
  Scratch<Real> scratch_;
  std::optional<ScoreModCaller> caller_;
  Real maximum_[AttentionPlan::kMostRows] = {};
  Real sum_[AttentionPlan::kMostRows] = {};
  Real rescale_[AttentionPlan::kMostRows] = {};
};

template <class Real>
class Backward {
 public:
  Backward(const AttentionProblem& problem, const AttentionOutput& output, const at::Tensor& grad_out,
           const at::Tensor& delta, at::TensorList captured, AttentionGradients& gradients)
      : problem_(problem),
        output_(output),
        grad_out_(grad_out),
        delta_(delta),
        captured_(captured),
        gradients_(gradients),
        score_scratch_(problem.query.options()),
        gradient_scratch_(problem.query.options()) {
    if (!problem.score_mod) return;
    caller_.emplace(problem);
    modified_scratch_.emplace(problem.query.options());
  }

  void head(std::int64_t batch, std::int64_t head) {
    const std::int64_t group = problem_.query.size(1) / problem_.key.size(1);
    Heads heads = {.batch = batch,
                   .head = head,
                   .query = head_of(problem_.query, batch, head),
                   .key = head_of(problem_.key, batch, head / group),
                   .value = head_of(problem_.value, batch, head / group),
                   .grad_out = head_of(grad_out_, batch, head)};
    if (gradients_.query.defined()) heads.grad_query = head_of(gradients_.query, batch, head);
    if (gradients_.key.defined()) heads.grad_key = head_of(gradients_.key, batch, head / group);
    if (gradients_.value.defined()) heads.grad_value = head_of(gradients_.value, batch, head / group);
    const Real* const log_sum = head_of(output_.log_sum, batch, head).template const_data_ptr<Real>();
    const Real* const delta = head_of(delta_, batch, head).template const_data_ptr<Real>();
    for (const Strip& strip : problem_.plan.strips(batch, head)) {
      for (const Run& run : problem_.plan.runs(strip)) {
        part(heads, strip, run, log_sum + strip.first_row, delta + strip.first_row);
      }
    }
  }

 private:
  // One head's share of each tensor.
  struct Heads {
    std::int64_t batch;
    std::int64_t head;
    at::Tensor query;
    at::Tensor key;
    at::Tensor value;
    at::Tensor grad_out;
    at::Tensor grad_query = {};
    at::Tensor grad_key = {};
    at::Tensor grad_value = {};
  };

  void part(const Heads& heads, const Strip& strip, const Run& run, const Real* log_sum, const Real* delta) {
    const auto queries = [&strip](const at::Tensor& tensor) { return tensor.narrow(0, strip.first_row, strip.rows); };
    const auto keys = [&run](const at::Tensor& tensor) { return tensor.narrow(0, run.first_key, run.keys); };
    const at::Tensor query = queries(heads.query);
    const at::Tensor key = keys(heads.key);
    const at::Tensor grad_out = queries(heads.grad_out);

    const at::Tensor scores = score_scratch_.view(strip, run);
    add_product(scores, query, key.t(), 0, problem_.scale);
    at::Tensor raw;
    at::Tensor modified;
    if (caller_) {
      const at::AutoGradMode with_gradients(true);
      raw = scores.detach().requires_grad_();
      modified = caller_->call(raw, heads.batch, heads.head, strip, run);
      modified_scratch_->view(strip, run).copy_(modified.detach());
    }
    const Scratch<Real>& probability_scratch = caller_ ? *modified_scratch_ : score_scratch_;
    mask_parts(problem_.plan, run, probability_scratch.rows(strip, run));
    softmax_again(probability_scratch.rows(strip, run), log_sum);
    const at::Tensor probabilities = probability_scratch.view(strip, run);
    if (heads.grad_value.defined()) add_product(keys(heads.grad_value), probabilities.t(), grad_out, 1);

    const at::Tensor gradients = gradient_scratch_.view(strip, run);
    add_product(gradients, grad_out, keys(heads.value).t(), 0);
    softmax_backward(gradient_scratch_.rows(strip, run), probability_scratch.data(), delta);
    if (caller_) through_score_mod(raw, modified, gradients);
    if (heads.grad_query.defined()) add_product(queries(heads.grad_query), gradients, key, 1, problem_.scale);
    if (heads.grad_key.defined()) add_product(keys(heads.grad_key), gradients.t(), query, 1, problem_.scale);
  }

  // Replaces the gradients of modified scores by those of the scores themselves.
  void through_score_mod(const at::Tensor& raw, const at::Tensor& modified, const at::Tensor& gradients) {
    if (!modified.requires_grad()) {
      gradients.zero_();
      return;
    }
    std::vector<at::Tensor> inputs = {raw};
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < captured_.size(); ++i) {
      if (!captured_[i].requires_grad()) continue;
      inputs.push_back(captured_[i]);
      places.push_back(i);
    }
    const auto found = torch::autograd::grad({modified}, inputs, {gradients.clone()}, /*retain_graph=*/false,
                                             /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (found[i + 1].defined()) gradients_.captured[places[i]].add_(found[i + 1]);
    }
    if (found[0].defined()) {
      gradients.copy_(found[0]);
    } else {
      gradients.zero_();
    }
  }

  const AttentionProblem& problem_;
  const AttentionOutput& output_;
  const at::Tensor& grad_out_;
  const at::Tensor& delta_;
  at::TensorList captured_;
  AttentionGradients& gradients_;
  Scratch<Real> score_scratch_;
  Scratch<Real> gradient_scratch_;
  std::optional<Scratch<Real>> modified_scratch_;
  std::optional<ScoreModCaller> caller_;
};

// Calls work(begin, end) for parts of [0, count), on several threads unless there is a score_mod. Its products use one MKL
// thread each, wherever they run: inside of a parallel region MKL would round otherwise than outside.
template <class Work>
void share(const AttentionProblem& problem, std::int64_t count, const Work& work) {
  if (count == 0) return;
  if (problem.score_mod) {
    work(0, count);
  } else {
    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      const IntraOpThreads one(1);
      work(begin, end);
    });
  }
}

template <class Real>
void forward(const AttentionProblem& problem, AttentionOutput& output) {
  const std::int64_t heads = problem.query.size(1);
  const auto strips = static_cast<std::int64_t>(problem.plan.strips(0, 0).size());
  share(problem, problem.query.size(0) * heads * strips, [&](std::int64_t begin, std::int64_t end) {
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

// Heads that share keys add to the same gradients, so one thread has them all.
template <class Real>
void backward(const AttentionProblem& problem, const AttentionOutput& output, const at::Tensor& grad_out,
              at::TensorList captured, AttentionGradients& gradients) {
  const at::Tensor delta = (grad_out * output.out).sum(-1);
  const std::int64_t kv_heads = problem.key.size(1);
  const std::int64_t group = problem.query.size(1) / kv_heads;
  share(problem, problem.query.size(0) * kv_heads, [&](std::int64_t begin, std::int64_t end) {
    Backward<Real> pass(problem, output, grad_out, delta, captured, gradients);
    for (std::int64_t each = begin; each < end; ++each) {
      for (std::int64_t i = 0; i < group; ++i) pass.head(each / kv_heads, each % kv_heads * group + i);
    }
  });
}

}  // namespace

AttentionOutput attention_forward(const AttentionProblem& problem) {
  const at::IntArrayRef sizes = problem.query.sizes();
  AttentionOutput output = {
      .out = at::empty({sizes[0], sizes[1], sizes[2], problem.value.size(3)}, problem.query.options()),
      .log_sum = at::empty({sizes[0], sizes[1], sizes[2]}, problem.query.options())};
  if (output.log_sum.numel() == 0) return output;
  if (problem.query.scalar_type() == at::kDouble) {
    forward<double>(problem, output);
  } else {
    forward<float>(problem, output);
  }
  return output;
}

AttentionGradients attention_backward(const AttentionProblem& problem, const AttentionOutput& output,
                                      const at::Tensor& grad_out, at::TensorList captured, std::array<bool, 3> wanted) {
  const auto zeros_for = [](const at::Tensor& tensor) { return at::zeros(tensor.sizes(), tensor.options()); };
  AttentionGradients gradients;
  if (wanted[0]) gradients.query = zeros_for(problem.query);
  if (wanted[1]) gradients.key = zeros_for(problem.key);
  if (wanted[2]) gradients.value = zeros_for(problem.value);
  for (const at::Tensor& tensor : captured) {
    gradients.captured.push_back(tensor.requires_grad() ? at::zeros_like(tensor) : at::Tensor());
  }
  if (output.log_sum.numel() == 0) return gradients;
  if (problem.query.scalar_type() == at::kDouble) {
    backward<double>(problem, output, grad_out, captured, gradients);
  } else {
    backward<float>(problem, output, grad_out, captured, gradients);
  }
  return gradients;
}

}  // namespace penstock::internal
