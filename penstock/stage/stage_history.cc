#include "penstock/stage/stage_history.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstring>
#include <exception>

#include "penstock/base/text.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/identity.h"

namespace penstock::internal {
namespace {

// True if both have the same bits. Values that cannot be compared so count as different: NaN may, and so do tensors on a
// device, for which the host would have to wait.
bool are_same(const at::Tensor& left, const at::Tensor& right) {
  if (left.layout() != at::kStrided || !left.is_cpu()) return false;
  if (!left.is_contiguous() || !right.is_contiguous()) return at::equal(left, right);
  return left.nbytes() == right.nbytes() &&
         (left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0);
}

}  // namespace

StageHistory::StageHistory(const StageModule& module) {
  for (const auto& [name, tensor] : module.written_tensors()) {
    if (!tensor.defined()) continue;
    written_.push_back(tensor);
    storages_.insert(memory_of(tensor));
  }
  for (const auto& [name, tensor] : module.parameters) {
    if (tensor.defined() && !writes_to(tensor)) parameters_.emplace_back(name, tensor);
  }
  forget();
}

StageHistory::Moment StageHistory::now(bool with_values) {
  const at::NoGradGuard no_grad;
  Moment moment;
  for (const auto& [name, parameter] : parameters_) moment.versions.push_back(version_of(parameter));
  if (!with_values) return moment;
  for (std::size_t i = 0; i < written_.size(); ++i) {
    if (!last_[i].defined() || !are_same(last_[i], written_[i])) last_[i] = written_[i].detach().clone();
  }
  moment.values = last_;
  return moment;
}

void StageHistory::restore(const Moment& moment) {
  const at::NoGradGuard no_grad;
  // Below autograd, a copy does not raise the version. A sparse tensor has no other way to its values.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < written_.size(); ++i) {
    if (are_same(moment.values[i], written_[i])) continue;
    written_[i].copy_(moment.values[i]);
    last_[i] = moment.values[i];
  }
}

void StageHistory::require_same_parameters(const Moment& moment) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, parameter] = parameters_[i];
    if (version_of(parameter) == moment.versions[i]) continue;
    throw StageError(
        concat("parameter '", name,
               "' was modified between a forward and its recomputation.\n"
               "  Hint: step the optimizer after the backwards; if the forward itself writes to it, add it "
               "to StageModule::state."));
  }
}

bool StageHistory::writes_to(const at::Tensor& tensor) const {
  return tensor.defined() && storages_.contains(memory_of(tensor));
}

MomentScope::~MomentScope() {
  try {
    history_.restore(before_);
  } catch (const std::exception& error) {
    TORCH_WARN("the buffers from before a recomputation could not be restored: ", error.what());
  }
}

}  // namespace penstock::internal
