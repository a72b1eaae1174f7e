#include "penstock/stage/checkpoint.h"

#include <ATen/ops/empty.h>

#include "penstock/stage/recomputation.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {

CheckpointedPart::CheckpointedPart() = default;
CheckpointedPart::~CheckpointedPart() = default;

bool CheckpointedPart::is_useful() {
  return RecomputedPartScope::is_useful();
}

void CheckpointedPart::add(const c10::IValue& value) {
  add(extract_tensor_args(value));
}

void CheckpointedPart::begin() {
  scope_ = std::make_unique<RecomputedPartScope>(inputs_);
  inputs_.clear();
}

void CheckpointedPart::finish(std::function<void(const std::vector<at::Tensor>& inputs)> function) {
  scope_->close(std::move(function));
}

void replace_tensors(c10::IValue& value, const at::Tensor*& next) {
  value = map_leaves(value, [&](const c10::IValue& leaf) -> c10::IValue {
    if (!leaf.isTensor()) return leaf;
    if (next != nullptr) return *next++;
    // Only defined tensors keep the types of the lists and dicts around them.
    return leaf.toTensor().defined() ? at::empty({0}) : at::Tensor();
  });
}

}  // namespace penstock::internal
