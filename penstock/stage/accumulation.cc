#include "penstock/stage/accumulation.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/count_nonzero.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "penstock/stage/wiring.h"

namespace penstock::internal {
namespace {

bool is_zero(const at::Tensor& gradient) {
  return at::count_nonzero(dense(gradient)).item<std::int64_t>() == 0;
}

bool same_values(const at::Tensor& one, const at::Tensor& other) {
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() && one.device() == other.device() &&
         at::allclose(dense(one), dense(other), /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true);
}

std::uint32_t version_of(const at::Tensor& tensor) {
  // What was made in inference mode counts nothing.
  return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// Either may be sparse.
at::Tensor added(const at::Tensor& one, const at::Tensor& other) {
  return one.is_sparse() && !other.is_sparse() ? other.add(one) : one.add(other);
}

}  // namespace

at::Tensor dense(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.to_dense() : gradient.contiguous();
}

AccumulatedGradients::AccumulatedGradients(const std::vector<Parameter>& parameters, PartOf part_of)
    : part_of_(std::move(part_of)) {
  for (const Parameter& parameter : parameters) {
    const bool seen = std::any_of(parameters_.begin(), parameters_.end(),
                                  [&](const Parameter& other) { return other.computed.is_same(parameter.computed); });
    if (!seen) parameters_.push_back(parameter);
  }
  parts_.resize(parameters_.size());
}

at::Tensor AccumulatedGradients::sum_of(std::size_t parameter, const Parts& parts) const {
  if (!parts.waiting.defined()) return parts.reduced;
  if (!part_of_ && !parts.reduced.defined()) return parts.waiting;
  const at::Tensor own = part_of_ ? part_of_(parameter, parts.waiting) : parts.waiting;
  return parts.reduced.defined() ? added(parts.reduced, own) : own.clone();
}

AccumulatedGradients::Parts AccumulatedGradients::left_of(std::size_t parameter) const {
  const Parts& parts = parts_[parameter];
  const at::Tensor& gradient = parameters_[parameter].visible.grad();
  if (!parts.waiting.defined() || !gradient.defined()) return {.reduced = gradient};
  // All that is there is what waits.
  if (parts.shown.is_same(parts.waiting)) return {.waiting = gradient};
  const bool is_as_left = same_values(gradient, sum_of(parameter, parts));
  const bool is_counted =
      !gradient.is_same(parts.shown) || gradient.is_inference() || version_of(gradient) != parts.version;
  // A write through .data() is not counted, so values decide. A gradient that was zero already is cleared by a write that
  // is counted.
  if (is_zero(gradient) && (!is_as_left || is_counted)) return {.reduced = gradient};
  // Untouched, or written to with the same values, as clipping may do.
  if (is_as_left) return parts;
  throw StageError(
      parameters_[parameter].name +
      ": .grad was changed while it holds what a step without a reduction has contributed; expected it to be "
      "as that step left it, none, or zero.\n"
      "  Hint: scale or clip gradients after a step that reduces them, or clear them first.");
}

void AccumulatedGradients::begin_step() {
  const c10::AutoGradMode no_grad(false);
  std::vector<Parts> left;
  for (std::size_t i = 0; i < parameters_.size(); ++i) left.push_back(left_of(i));
  was_reduced_ = false;
  before_.clear();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    before_.push_back({std::exchange(parameter.visible.mutable_grad(), {}), std::move(parts_[i])});
    parts_[i] = std::move(left[i]);
    parts_[i].shown.reset();
    parameter.computed.mutable_grad() = parts_[i].waiting;
  }
}

void AccumulatedGradients::end_reduction(const std::vector<at::Tensor>& reduced) {
  const c10::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // Not into what was set aside: the step may still fail.
    const at::Tensor before = std::exchange(parts_[i], {}).reduced;
    parameters_[i].computed.mutable_grad().reset();
    at::Tensor& gradient = parameters_[i].visible.mutable_grad();
    gradient = before.defined() && reduced[i].defined() ? added(before, reduced[i])
               : before.defined()                       ? before
                                                        : reduced[i];
  }
  was_reduced_ = true;
}

void AccumulatedGradients::end_step() {
  if (before_.empty()) return;
  before_.clear();
  if (was_reduced_) return;
  const c10::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parts& parts = parts_[i];
    parts.waiting = std::exchange(parameters_[i].computed.mutable_grad(), {});
    parts.shown = sum_of(i, parts);
    parameters_[i].visible.mutable_grad() = parts.shown;
    if (!parts.waiting.defined()) {
      parts = {};
    } else {
      parts.version = version_of(parts.shown);
    }
  }
}

void AccumulatedGradients::rollback() {
  if (before_.empty()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].computed.mutable_grad().reset();
    parameters_[i].visible.mutable_grad() = std::move(before_[i].gradient);
    parts_[i] = std::move(before_[i].parts);
  }
  before_.clear();
}

}  // namespace penstock::internal
