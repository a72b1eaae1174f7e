#include "penstock/stage/first_member_values.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <cstddef>
#include <unordered_set>

namespace penstock::internal {

FirstMemberValues::FirstMemberValues(const StageModule& module, Group& group, Deadline deadline) {
  const c10::AutoGradMode no_grad(false);
  std::unordered_set<const void*> seen;
  for (const NamedTensors* named : {&module.parameters, &module.buffers}) {
    for (const auto& [name, tensor] : *named) {
      if (seen.insert(tensor.unsafeGetTensorImpl()).second) tensors_.push_back(tensor.detach());
    }
  }
  for (const at::Tensor& tensor : tensors_) values_.push_back(group.member() == 0 ? tensor : at::empty_like(tensor));
  group.broadcast(values_, 0)->wait(deadline);
  group.barrier()->wait(deadline);
}

void FirstMemberValues::adopt() {
  const c10::AutoGradMode no_grad(false);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!values_[i].is_same(tensors_[i])) tensors_[i].copy_(values_[i]);
  }
  tensors_.clear();
  values_.clear();
}

}  // namespace penstock::internal
