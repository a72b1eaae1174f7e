#include "penstock/runtime/loss_weight.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "penstock/base/text.h"
#include "penstock/runtime/error.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

at::Tensor first_tensor(const c10::IValue& target) {
  const std::vector<at::Tensor> tensors = extract_tensor_args(target);
  if (!tensors.empty() && tensors.front().defined()) return tensors.front();
  throw PipelineError(
      internal::concat("the target is ", describe(target), ", which has no rows or elements to count for its weight."));
}

}  // namespace

LossWeight count_rows() {
  return [](const c10::IValue& target, const Kwargs&) {
    const at::Tensor tensor = first_tensor(target);
    return tensor.dim() == 0 ? 1.0 : static_cast<double>(tensor.size(0));
  };
}

LossWeight count_targets(std::int64_t ignore_index) {
  return [ignore_index](const c10::IValue& target, const Kwargs&) {
    return static_cast<double>(first_tensor(target).ne(ignore_index).sum().item<std::int64_t>());
  };
}

double StepResult::loss() const {
  double sum = 0;
  double total = 0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    const double weight = weights.empty() ? 1.0 : weights[i];
    // The mean over nothing may be NaN.
    if (weight == 0) continue;
    sum += weight * losses[i].item<double>();
    total += weight;
  }
  return total == 0 ? std::numeric_limits<double>::quiet_NaN() : sum / total;
}

namespace internal {
namespace {

void all_reduce(Group& group, std::vector<double>& numbers, Deadline deadline) {
  const at::Tensor tensor = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kDouble);
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<double>());
  group.all_reduce({tensor})->wait(deadline);
  const double* const sums = tensor.const_data_ptr<double>();
  std::copy(sums, sums + numbers.size(), numbers.begin());
}

}  // namespace

void weigh(StepInputs& inputs, const LossWeight& weight) {
  for (std::size_t i = 0; i < inputs.microbatches.size(); ++i) {
    const double found = weight(inputs.microbatches[i].target, inputs.options->loss_kwargs);
    if (!std::isfinite(found) || found < 0) {
      throw PipelineError(concat("the loss weight of microbatch ", i, " is ", std::to_string(found),
                                 ", expected a finite number of at least 0.\n  Hint: let PipelineOptions::loss_weight "
                                 "count the rows or targets that the loss is the mean of."));
    }
    inputs.weights.weights[i] = found;
  }
}

void set_factors(LossWeights& weights, double total, int replicas) {
  if (weights.has_given_factors) return;
  for (std::size_t i = 0; i < weights.factors.size(); ++i) {
    const double weight = weights.weights[i];
    weights.factors[i] = weight == 0 || !weights.scale_grads ? weight : weight * static_cast<double>(replicas) / total;
  }
}

void share_weights(LossWeights& weights, Group* replica_group, Group* counterparts, int replicas, Deadline deadline) {
  if (replica_group != nullptr) all_reduce(*replica_group, weights.weights, deadline);
  std::vector<double> total{std::accumulate(weights.weights.begin(), weights.weights.end(), 0.0)};
  if (counterparts != nullptr) all_reduce(*counterparts, total, deadline);
  set_factors(weights, weights.total.value_or(total.front()), replicas);
}

std::int64_t count_terms(const StepOutputs& outputs) {
  std::int64_t count = 0;
  for (const auto& by_stage : outputs.loss_terms) {
    for (const auto& [stage, terms] : by_stage) count += static_cast<std::int64_t>(terms.size());
  }
  return count;
}

void share_terms(StepOutputs& outputs, Group& replica_group, Deadline deadline) {
  std::vector<double> count{static_cast<double>(count_terms(outputs))};
  all_reduce(replica_group, count, deadline);
  outputs.has_terms_elsewhere = count.front() > 0;
}

}  // namespace internal
}  // namespace penstock
