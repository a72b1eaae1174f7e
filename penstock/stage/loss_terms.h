// Collects the loss terms that a module adds in its forward (add_loss in stage.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace penstock::internal {

// While it lives, add_loss on this thread appends to the terms given. Scopes nest.
class LossTermScope {
 public:
  // `terms` outlives the scope.
  explicit LossTermScope(std::vector<at::Tensor>& terms);
  ~LossTermScope();
  LossTermScope(const LossTermScope&) = delete;
  LossTermScope& operator=(const LossTermScope&) = delete;

 private:
  // The terms of the enclosing scope; null without one.
  std::vector<at::Tensor>* outer_;
};

}  // namespace penstock::internal
