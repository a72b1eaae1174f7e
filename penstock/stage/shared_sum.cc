#include "penstock/stage/shared_sum.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <vector>

#include "penstock/device/transfer.h"

namespace penstock::internal {
namespace {

std::vector<AccumulatedGradients::Parameter> accumulated(const NamedTensors& tensors) {
  std::vector<AccumulatedGradients::Parameter> parameters;
  for (const auto& [name, parameter] : tensors) parameters.push_back({name, parameter, parameter});
  return parameters;
}

}  // namespace

SharedSum::SharedSum(const NamedTensors& tensors, Groups groups, int replicas)
    : gradients_(accumulated(tensors)), groups_(std::move(groups)), replicas_(replicas) {}

void SharedSum::reduce(Deadline deadline) {
  const c10::AutoGradMode no_grad(false);
  if (groups_.owners) groups_.owners->barrier()->wait(deadline);
  if (!groups_.representatives) return;
  at::Tensor sum;
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    const at::Tensor& gradient = gradients_.computed(i).grad();
    if (!gradient.defined()) continue;
    sum = sum.defined() ? sum.add(copied_to(dense(gradient), sum.device())) : dense(gradient).clone();
  }
  const at::Tensor present = at::full({1}, sum.defined() ? 1 : 0, at::TensorOptions(at::kFloat));
  if (!sum.defined()) sum = at::zeros_like(gradients_.computed(0)).detach();
  groups_.representatives->all_reduce({sum, present})->wait(deadline);
  sum.div_(replicas_);
  std::vector<at::Tensor> sums(gradients_.size());
  // Where no rank has a gradient there is none, as in one process.
  if (present.item<float>() > 0) {
    for (std::size_t i = 0; i < sums.size(); ++i) {
      const bool is_first = sum.device() == gradients_.computed(i).device() && i == 0;
      sums[i] = is_first ? sum : copied_to(sum, gradients_.computed(i).device(), /*always=*/true);
    }
  }
  gradients_.end_reduction(sums);
}

}  // namespace penstock::internal
