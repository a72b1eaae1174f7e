// Activation checkpointing: trades time for memory. A part of a forward saves its inputs only, and is computed again
// when the backward needs its activations.
//
//   at::Tensor y = checkpoint([block](const at::Tensor& x) { return block->forward(x); }, x);
//
// Losses and gradients are bitwise identical to those without it: the part draws the same random numbers, runs under
// the same autocast, and does not update the buffers of its stage twice. It is computed again once, also if the
// backward runs in halves. To recompute a whole stage at a place in the schedule, use an `R` action: see
// add_recomputation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <functional>
#include <memory>
#include <optional>
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
  void add(const std::optional<at::Tensor>& tensor) { inputs_.push_back(tensor.value_or(at::Tensor())); }
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
inline void replace_tensors(std::optional<at::Tensor>& tensor, const at::Tensor*& next) {
  at::Tensor replacement;
  replace_tensors(replacement, next);
  // A value of nothing stays nothing.
  if (tensor) tensor = replacement;
}
void replace_tensors(c10::IValue& value, const at::Tensor*& next);
template <class Other>
void replace_tensors(Other& /*value*/, const at::Tensor*& /*next*/) {}

// True for lists that refer to memory of the caller, such as at::TensorList.
template <class Input>
constexpr bool kIsReference = false;
template <class Element>
constexpr bool kIsReference<c10::ArrayRef<Element>> = true;

}  // namespace internal

// Returns function(inputs…), whose backward computes it again. The inputs are tensors, optional tensors, vectors of
// tensors, nested values (c10::IValue), and anything else that owns what it refers to and can be copied; tensors within
// other types are not checked. It may use parameters without listing them, and must not write into its inputs. Within
// another checkpoint, and without autograd, it is called as it is.
//
// `function` is kept until the backward, or until the graph is freed, so it should own what it refers to. It must not
// own what keeps its result alive, such as a module that stores its last output: a forward whose backward never runs,
// as in a step that fails, would not be freed.
//
// The result must depend on the inputs, on parameters and on buffers of the stage alone. Throws StageError if the
// function writes into an input. The backward throws it if an input was written to after the part (`x += checkpoint(f,
// x)`), if a parameter has changed meanwhile (of a stage, any of its parameters; otherwise one that autograd would have
// saved), or if the second run saves tensors of another number, shape or dtype; other differences give wrong gradients.
// Random numbers are those of the RandomScope, as in every forward of a stage; outside of one, the backward sets the
// process's CPU generator back for as long as it computes the function, so no other thread should draw from it.
template <class Function, class... Inputs>
  requires(!internal::kIsReference<Inputs> && ...)
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
