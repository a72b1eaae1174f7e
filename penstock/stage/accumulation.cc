#include "penstock/stage/accumulation.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/count_nonzero.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/identity.h"

namespace penstock::internal {
namespace {

bool is_zero(const at::Tensor& gradient) {
  return at::count_nonzero(dense(gradient)).item<std::int64_t>() == 0;
}

bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && a.device() == b.device() &&
         at::allclose(dense(a), dense(b), /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true);
}

// Returns the sum of two gradients, each of which may be sparse.
at::Tensor added(const at::Tensor& a, const at::Tensor& b) {
  return a.is_sparse() && !b.is_sparse() ? b.add(a) : a.add(b);
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

at::Tensor AccumulatedGradients::to_reduce(std::size_t parameter) const {
  const at::Tensor& gradient = computed(parameter).grad();
  if (!gradient.defined()) return {};
  const at::Tensor result = dense(gradient);
  const bool is_from_before = !before_.empty() && before_[parameter].in_grad == result.unsafeGetTensorImpl();
  return is_from_before ? result.clone() : result;
}

at::Tensor AccumulatedGradients::sum_of(std::size_t parameter, const Parts& parts) const {
  if (!parts.unreduced.defined()) return parts.reduced;
  if (!part_of_ && !parts.reduced.defined()) return parts.unreduced;
  const at::Tensor part = part_of_ ? part_of_(parameter, parts.unreduced) : parts.unreduced;
  return parts.reduced.defined() ? added(parts.reduced, part) : part.clone();
}

AccumulatedGradients::Parts AccumulatedGradients::left_of(std::size_t parameter) const {
  const Parts& parts = parts_[parameter];
  const at::Tensor& gradient = parameters_[parameter].visible.grad();
  if (!parts.unreduced.defined() || !gradient.defined()) return {.reduced = gradient};
  // Nothing was reduced, so .grad is the unreduced part, whatever was written to it.
  if (parts.shown.is_same(parts.unreduced)) return {.unreduced = gradient};
  const bool has_new_version =
      !gradient.is_same(parts.shown) || gradient.is_inference() || version_of(gradient) != parts.version;
  // The host would have to wait for the values of a device.
  if (!gradient.is_cpu() && !has_new_version) return parts;
  const bool is_as_left = same_values(gradient, sum_of(parameter, parts));
  // A write through .data() does not change the version, so values decide. A gradient that was zero already is cleared
  // by a write that does.
  if (is_zero(gradient) && (!is_as_left || has_new_version)) return {.reduced = gradient};
  // Untouched, or written to with the same values, as clipping may do.
  if (is_as_left) return parts;
  throw StageError(
      concat(parameters_[parameter].name,
             ": .grad was changed while it holds what a step without a reduction has contributed; expected it to be "
             "as that step left it, none, or zero.\n"
             "  Hint: scale or clip gradients after a step that reduces them, or clear them first."));
}

void AccumulatedGradients::begin_step() {
  const c10::AutoGradMode no_grad(false);
  std::vector<Parts> left;
  for (std::size_t i = 0; i < parameters_.size(); ++i) left.push_back(left_of(i));
  was_reduced_ = false;
  before_.clear();
  // Nothing below allocates for the list, so that every gradient that is moved out is in it.
  before_.reserve(parameters_.size());
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    Before& before =
        before_.emplace_back(Before{std::exchange(parameter.visible.mutable_grad(), {}), std::move(parts_[i])});
    parts_[i] = std::move(left[i]);
    parts_[i].shown.reset();
    at::Tensor unreduced = std::exchange(parts_[i].unreduced, {});
    if (unreduced.defined()) {
      before.in_grad = unreduced.unsafeGetTensorImpl();
      const auto references = before.references();
      for (std::size_t k = 0; k < references.size(); ++k) {
        before.was_in_grad[k] = references[k]->is_same(unreduced);
        if (before.was_in_grad[k]) references[k]->reset();
      }
    }
    parameter.computed.mutable_grad() = std::move(unreduced);
  }
}

void AccumulatedGradients::end_reduction(const std::vector<at::Tensor>& reduced) {
  const c10::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    // Out of place, as the step may still fail.
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
    parts.unreduced = std::exchange(parameters_[i].computed.mutable_grad(), {});
    parts.shown = sum_of(i, parts);
    parameters_[i].visible.mutable_grad() = parts.shown;
    if (!parts.unreduced.defined()) {
      parts = {};
    } else {
      parts.version = version_of(parts.shown);
    }
  }
}

void AccumulatedGradients::rollback() {
  if (before_.empty()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Before& before = before_[i];
    const at::Tensor unreduced = std::exchange(parameters_[i].computed.mutable_grad(), {});
    const auto references = before.references();
    for (std::size_t k = 0; k < references.size(); ++k) {
      if (before.was_in_grad[k]) *references[k] = unreduced;
    }
    parameters_[i].visible.mutable_grad() = std::move(before.gradient);
    parts_[i] = std::move(before.parts);
  }
  before_.clear();
}

}  // namespace penstock::internal
