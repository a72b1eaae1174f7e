#include "penstock/runtime/loss_weight.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "penstock/runtime/error.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

at::Tensor first_tensor(const c10::IValue& target) {
  const std::vector<at::Tensor> tensors = extract_tensor_args(target);
  if (!tensors.empty() && tensors.front().defined()) return tensors.front();
  throw PipelineError("the target is " + describe(target) + ", which has no rows or elements to count for its weight.");
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
    // The mean of nothing may be NaN.
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

void weigh(StepWork& work, const LossWeight& weight) {
  for (std::size_t i = 0; i < work.microbatches.size(); ++i) {
    const double found = weight(work.microbatches[i].target, work.loss_kwargs);
    if (!std::isfinite(found) || found < 0) {
      throw PipelineError("the loss weight of microbatch " + std::to_string(i) + " is " + std::to_string(found) +
                          ", expected a finite number of at least 0.\n  Hint: it counts the rows or targets that the "
                          "loss is the mean of.");
    }
    work.loss_weights[i] = found;
  }
}

void set_seeds(StepWork& work, double total, int replicas) {
  if (work.seeds_are_given) return;
  for (std::size_t i = 0; i < work.weights.size(); ++i) {
    const double weight = work.loss_weights[i];
    work.weights[i] = weight == 0 || !work.scale_grads ? weight : weight * static_cast<double>(replicas) / total;
  }
}

std::int64_t count_terms(const StepWork& work) {
  std::int64_t count = 0;
  for (const auto& by_stage : work.loss_terms) {
    for (const auto& [stage, terms] : by_stage) count += static_cast<std::int64_t>(terms.size());
  }
  return count;
}

void share_terms(StepWork& work, Group& replica_group, Deadline deadline) {
  std::vector<double> count{static_cast<double>(count_terms(work))};
  all_reduce(replica_group, count, deadline);
  work.has_terms_elsewhere = count.front() > 0;
}

void share_weights(StepWork& work, Group* replica_group, Group* counterparts, int replicas, Deadline deadline) {
  if (replica_group != nullptr) all_reduce(*replica_group, work.loss_weights, deadline);
  std::vector<double> total{std::accumulate(work.loss_weights.begin(), work.loss_weights.end(), 0.0)};
  if (counterparts != nullptr) all_reduce(*counterparts, total, deadline);
  set_seeds(work, work.total_weight.value_or(total.front()), replicas);
}

}  // namespace internal
}  // namespace penstock
