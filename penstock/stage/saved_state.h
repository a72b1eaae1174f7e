// SavedState holds what a step may change and a rollback restores: gradients, in the tensors that hold them, and the
// values of buffers.
//
//   SavedState saved;
//   saved.add_accumulated_gradient(parameter);
//   saved.add_values(running_mean);
//   …                       // the step fails
//   saved.restore();
//
// Saving an accumulated gradient costs no time. When autograd first adds to it in a step, the sum is written into the
// memory of the incoming gradient, which autograd would free, and becomes .grad. The gradient from before the step
// stays as it was in its own tensor until the step has ended. The sums are bitwise those of an addition in place. So a
// step holds the gradients from before it beside the new ones, which any rollback needs, but copies neither.
//
// This requires that nothing else refers to the gradient. One that has a view or another reference (a flat buffer, a
// tensor that the user keeps) or that is sparse has to change in place, and its values are copied at once. So has one
// whose parameter belongs to several stages or has hooks: its values are copied when autograd first adds to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace penstock::internal {

// Additions, restore() and clear() are called by one thread while no backward runs. Backwards on any number of threads
// may add to the gradients in between.
class SavedState {
 public:
  SavedState();
  // Clears.
  ~SavedState();
  SavedState(SavedState&&) noexcept;
  SavedState& operator=(SavedState&&) noexcept;
  SavedState(const SavedState&) = delete;
  SavedState& operator=(const SavedState&) = delete;

  // Saves .grad of a tensor: the gradient tensor itself and a copy of its values, whatever may write to it.
  void add_gradient(const at::Tensor& tensor);
  // Saves .grad of a parameter to which autograd alone adds until restore() or clear(). Writes to .grad by anything
  // else are not restored. A stage adds each of its parameters once; one that is added again belongs to several stages.
  void add_accumulated_gradient(const at::Tensor& parameter);
  // Saves the gradients that a backward through a value would change: those of its tensors and of the leaves that they
  // were computed from.
  void add_gradients_behind(const c10::IValue& value);
  // Saves a copy of the values.
  void add_values(const at::Tensor& tensor);

  // Restores everything and clears.
  void restore();
  // Forgets everything that was saved.
  void clear();

 private:
  class Gradient;
  class AccumulationHook;
  struct Values {
    at::Tensor tensor;
    at::Tensor values;
  };

  std::vector<std::unique_ptr<Gradient>> gradients_;
  std::vector<Values> values_;
  // Gradients by the tensor that has them; they are owned by gradients_.
  std::unordered_map<const void*, Gradient*> gradient_of_;
  // Tensors in values_: one buffer may be in several stages.
  std::unordered_set<const void*> with_values_;
};

}  // namespace penstock::internal
