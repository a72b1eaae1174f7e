#include "penstock/stage/buffer_history.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <exception>

namespace penstock::internal {
namespace {

// True if both have the same bits. Values that cannot be compared so, such as NaN, may count as different.
bool are_same(const at::Tensor& left, const at::Tensor& right) {
  if (left.layout() != at::kStrided) return false;
  if (!left.is_cpu() || !left.is_contiguous() || !right.is_contiguous()) return at::equal(left, right);
  return left.nbytes() == right.nbytes() &&
         (left.nbytes() == 0 || std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0);
}

}  // namespace

BufferHistory::BufferHistory(const StageModule& module) {
  for (const NamedTensors* written : {&module.buffers, &module.state}) {
    for (const auto& [name, tensor] : *written) {
      if (tensor.defined()) buffers_.push_back(tensor);
    }
  }
  forget();
}

BufferHistory::Moment BufferHistory::now() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (!last_[i].defined() || !are_same(last_[i], buffers_[i])) last_[i] = buffers_[i].detach().clone();
  }
  return last_;
}

void BufferHistory::restore(const Moment& moment) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (are_same(moment[i], buffers_[i])) continue;
    buffers_[i].variable_data().copy_(moment[i]);
    last_[i] = moment[i];
  }
}

MomentScope::~MomentScope() {
  try {
    history_.restore(before_);
  } catch (const std::exception& error) {
    TORCH_WARN("the buffers from before a recomputation could not be restored: ", error.what());
  }
}

}  // namespace penstock::internal
