// Decides how autograd saves tensors for the backward, on one thread and for a while.
//
// libtorch asks its engine for hooks whenever it saves a tensor, and its own engine has none. The first scope therefore
// makes the default engine one that forwards everything to the engine from before, and answers this question.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <functional>
#include <memory>

namespace penstock::internal {

// While it lives, each tensor that an operator of this thread saves gets hooks from `make`. Scopes nest; the innermost
// counts. It ends on the thread that began it, in reverse order.
class SavedTensorHooksScope {
 public:
  using MakeHooks = std::function<std::unique_ptr<torch::autograd::SavedVariableHooks>()>;

  explicit SavedTensorHooksScope(MakeHooks make);
  ~SavedTensorHooksScope();
  SavedTensorHooksScope(const SavedTensorHooksScope&) = delete;
  SavedTensorHooksScope& operator=(const SavedTensorHooksScope&) = delete;

 private:
  friend class HookingEngine;

  MakeHooks make_;
  SavedTensorHooksScope* outer_;
};

}  // namespace penstock::internal
