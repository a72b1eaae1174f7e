// Activation checkpointing: trades time for memory. A part of a forward saves its inputs only, and is computed again when
// the backward needs its activations.
//
//   at::Tensor y = checkpoint([block](const at::Tensor& x) { return block->forward(x); }, x);
//
// Losses and gradients are bitwise identical to those without it: the part draws the same random numbers, runs under the
// same autocast, and does not update the buffers of its stage twice. It is computed again once, also if the backward runs
// in halves. To recompute a whole stage at a place in the schedule, use an `R` action: see add_recomputation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock {

namespace internal {

class RecomputedPartScope;

// A part of a forward. The forward runs while it exists, and finish() ends it.
class CheckpointedPart {
 public:
  // Collects the tensors of the inputs: call it for each of them, before begin().
  void add(const at::Tensor& tensor) { inputs_.push_back(tensor); }
  void add(const std::vector<at::Tensor>& tensors) { inputs_.insert(inputs_.end(), tensors.begin(), tensors.end()); }
  void add(const c10::IValue& value);
  template <class Other>
  void add(const Other& /*value*/) {}

  void begin();
  // `function` computes the part again from its inputs.
  void finish(std::function<void(const std::vector<at::Tensor>& inputs)> function);

  // True where a part saves something: autograd is on, and this is not within another part.
  static bool is_useful();

  CheckpointedPart();
  ~CheckpointedPart();
  CheckpointedPart(const CheckpointedPart&) = delete;
  CheckpointedPart& operator=(const CheckpointedPart&) = delete;

 private:
  std::vector<at::Tensor> inputs_;
  // Null before begin().
  std::unique_ptr<RecomputedPartScope> scope_;
};

// Replace the tensors of a value by the next of those given, or by none, so that the value keeps no graph alive.
inline void replace_tensors(at::Tensor& tensor, const at::Tensor*& next) {
  tensor = next == nullptr ? at::Tensor() : *next++;
}
inline void replace_tensors(std::vector<at::Tensor>& tensors, const at::Tensor*& next) {
  for (at::Tensor& tensor : tensors) replace_tensors(tensor, next);
}
void replace_tensors(c10::IValue& value, const at::Tensor*& next);
template <class Other>
void replace_tensors(Other& /*value*/, const at::Tensor*& /*next*/) {}

}  // namespace internal

// Returns function(inputs…), whose backward computes it again. The inputs are tensors, vectors of tensors, nested values
// (c10::IValue), and anything else that can be copied; `function` is kept until the backward, so it should own what it
// refers to. It may use parameters without listing them, and must not write into its inputs. Within another checkpoint,
// and without autograd, it is called as it is.
//
// The result must depend on the inputs, on parameters and on buffers of the stage alone. Throws StageError if the function
// writes into an input, and the backward throws it if a parameter has changed meanwhile, or the second run saves tensors of
// another number, shape or dtype; other differences give wrong gradients.
template <class Function, class... Inputs>
auto checkpoint(Function function, Inputs... inputs) {
  if (!internal::CheckpointedPart::is_useful()) return function(inputs...);
  internal::CheckpointedPart part;
  (part.add(inputs), ...);
  part.begin();
  auto result = function(std::as_const(inputs)...);
  std::tuple<Inputs...> values(std::move(inputs)...);
  const at::Tensor* none = nullptr;
  std::apply([&](auto&... value) { (internal::replace_tensors(value, none), ...); }, values);
  part.finish(
      [function = std::move(function), values = std::move(values)](const std::vector<at::Tensor>& tensors) mutable {
        std::tuple<Inputs...> copies = values;
        const at::Tensor* next = tensors.data();
        std::apply([&](auto&... value) { (internal::replace_tensors(value, next), ...); }, copies);
        std::apply(function, std::as_const(copies));
      });
  return result;
}

}  // namespace penstock
