// What a step may change and a rollback restores: gradients, with the tensors that held them, and the values of buffers.
//
//   SavedState saved;
//   saved.add_gradient(parameter);
//   saved.add_values(running_mean);
//   …                       // the step fails
//   saved.restore();
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <unordered_set>
#include <vector>

namespace penstock::internal {

class SavedState {
 public:
  // Saves .grad: the tensor itself, which may be a view of somebody's flat buffer, and a copy of its values, as backwards
  // add to it in place.
  void add_gradient(const at::Tensor& tensor);
  // Saves the gradients that a backward through a value would change: those of its tensors and of the leaves that they
  // were computed from.
  void add_gradients_behind(const c10::IValue& value);
  // Saves a copy of the values.
  void add_values(const at::Tensor& tensor);

  // Puts everything back, and forgets it.
  void restore();
  void clear();

 private:
  struct Gradient {
    at::Tensor of;
    at::Tensor gradient;
    at::Tensor values;
  };
  struct Values {
    at::Tensor tensor;
    at::Tensor values;
  };
  std::vector<Gradient> gradients_;
  std::vector<Values> values_;
  // What has been added: one tensor may be in several stages.
  std::unordered_set<const void*> with_gradient_;
  std::unordered_set<const void*> with_values_;
};

}  // namespace penstock::internal
