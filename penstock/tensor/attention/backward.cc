#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/tensor/attention/pass.h"
#include "penstock/tensor/attention/rows.h"
#include "penstock/tensor/attention/score_mod_caller.h"
#include "penstock/tensor/attention/strip.h"

namespace penstock::internal {
namespace {

using Run = AttentionPlan::Run;
using Strip = AttentionPlan::Strip;

// Recomputes the scores of each strip and run, and accumulates gradients. Used by one thread.
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
    const Real* const logsumexp = head_of(output_.logsumexp, batch, head).template const_data_ptr<Real>();
    const Real* const delta = head_of(delta_, batch, head).template const_data_ptr<Real>();
    for (const Strip& strip : problem_.plan.strips(batch, head)) {
      for (const Run& run : problem_.plan.runs(strip)) {
        add_gradients(heads, strip, run, logsumexp + strip.first_row, delta + strip.first_row);
      }
    }
  }

 private:
  // The slices of all tensors that belong to one head.
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

  void add_gradients(const Heads& heads, const Strip& strip, const Run& run, const Real* logsumexp, const Real* delta) {
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
    recompute_softmax(probability_scratch.rows(strip, run), logsumexp);
    const at::Tensor probabilities = probability_scratch.view(strip, run);
    if (heads.grad_value.defined()) add_product(keys(heads.grad_value), probabilities.t(), grad_out, 1);

    const at::Tensor gradients = gradient_scratch_.view(strip, run);
    add_product(gradients, grad_out, keys(heads.value).t(), 0);
    softmax_backward(gradient_scratch_.rows(strip, run), probability_scratch.data(), delta);
    if (caller_) backward_score_mod(raw, modified, gradients);
    if (heads.grad_query.defined()) add_product(queries(heads.grad_query), gradients, key, 1, problem_.scale);
    if (heads.grad_key.defined()) add_product(keys(heads.grad_key), gradients.t(), query, 1, problem_.scale);
  }

  // Replaces the gradients of modified scores by those of the scores that score_mod was given.
  void backward_score_mod(const at::Tensor& raw, const at::Tensor& modified, const at::Tensor& gradients) {
    if (!modified.requires_grad()) {
      gradients.zero_();
      return;
    }
    std::vector<at::Tensor> inputs = {raw};
    std::vector<std::size_t> captured_indices;
    for (std::size_t i = 0; i < captured_.size(); ++i) {
      if (!captured_[i].requires_grad()) continue;
      inputs.push_back(captured_[i]);
      captured_indices.push_back(i);
    }
    const auto found = torch::autograd::grad({modified}, inputs, {gradients.clone()}, /*retain_graph=*/false,
                                             /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < captured_indices.size(); ++i) {
      if (found[i + 1].defined()) gradients_.captured[captured_indices[i]].add_(found[i + 1]);
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

// Heads that share keys add to the same gradients, so one thread computes all of them.
template <class Real>
void backward(const AttentionProblem& problem, const AttentionOutput& output, const at::Tensor& grad_out,
              at::TensorList captured, AttentionGradients& gradients) {
  const at::Tensor delta = (grad_out * output.out).sum(-1);
  const std::int64_t kv_heads = problem.key.size(1);
  const std::int64_t group = problem.query.size(1) / kv_heads;
  parallel_work(problem, problem.query.size(0) * kv_heads, [&](std::int64_t begin, std::int64_t end) {
    Backward<Real> pass(problem, output, grad_out, delta, captured, gradients);
    for (std::int64_t index = begin; index < end; ++index) {
      for (std::int64_t i = 0; i < group; ++i) pass.head(index / kv_heads, index % kv_heads * group + i);
    }
  });
}

}  // namespace

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
  if (output.logsumexp.numel() == 0) return gradients;
  if (problem.query.scalar_type() == at::kDouble) {
    backward<double>(problem, output, grad_out, captured, gradients);
  } else {
    backward<float>(problem, output, grad_out, captured, gradients);
  }
  return gradients;
}

}  // namespace penstock::internal
