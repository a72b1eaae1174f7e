// Gradients of parameters that several ranks have, over the steps of an accumulation.
//
// A reduction sums what steps have contributed since the last reduction. Gradients that were reduced before are moved
// out of .grad during a step and added again after it. Between two steps, .grad of the parameter that an optimizer sees
// holds all that has been accumulated: the reduced part plus the part that this rank has contributed and not reduced
// yet. Clearing .grad, by setting it to none or by zeroing it in place, therefore clears both parts, for that parameter
// alone. Any other change is accepted where .grad holds only one of the two parts. Where it is a sum of both, or shows
// only a shard of the unreduced part, the parts cannot be told apart after a change, and the next step is refused.
//
// Autograd does not count writes through .data(), so these are noticed only where they change values: a shard without
// elements, or one whose gradient is zero, does not show that it was cleared so. On a device they are not noticed at all,
// as the host does not wait for its values. zero_() and setting .grad to none always are.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace penstock::internal {

// Returns a gradient in the layout in which it is summed over ranks and in which optimizers take it. That of an
// embedding may be sparse.
at::Tensor dense(const at::Tensor& gradient);

// Used by one thread at a time.
class AccumulatedGradients {
 public:
  struct Parameter {
    // Names the parameter in errors, such as "stage 1, parameter 'w'".
    std::string name;
    // The tensor that an optimizer sees.
    at::Tensor visible;
    // The tensor to whose .grad backwards add: `visible` itself, or the whole parameter of which `visible` is a shard.
    at::Tensor computed;
  };
  // Returns the part of a gradient of `computed` that belongs to `visible`.
  using PartOf = std::function<at::Tensor(std::size_t parameter, const at::Tensor& gradient)>;

  // Parameters that are the same tensor count once. `part_of` is null when all are visible as they are computed.
  explicit AccumulatedGradients(const std::vector<Parameter>& parameters, PartOf part_of = nullptr);

  std::size_t size() const { return parameters_.size(); }
  const at::Tensor& computed(std::size_t parameter) const { return parameters_[parameter].computed; }
  // Returns the gradient that is to be reduced, as a dense tensor that the reduction may overwrite; undefined if this
  // rank has none. It is .grad itself, unless no backward of this step has added to it: then a rollback needs its
  // values.
  at::Tensor to_reduce(std::size_t parameter) const;

  // Leaves only the unreduced part in .grad of `computed`, for backwards to add to. Throws StageError, before anything
  // has changed, when .grad was changed in a way that cannot be followed.
  void begin_step();
  // Takes the gradients that a reduction gave, undefined where no rank had one.
  void end_reduction(const std::vector<at::Tensor>& reduced);
  // After a step that succeeded, reduced or not: makes all that has been accumulated visible.
  void end_step();
  // After a step that failed: puts the same tensors into .grad as before begin_step, if that was called. The caller has
  // restored .grad of `computed`, with its values, to what begin_step left there.
  void rollback();

 private:
  // The accumulated gradients of a parameter.
  struct Parts {
    at::Tensor reduced = {};
    // Contributed by this rank and not reduced yet. During a step it is in .grad of `computed` alone, so that
    // SavedState finds no other reference to it.
    at::Tensor unreduced = {};
    // The tensor that end_step left in .grad while a part is unreduced, and its version.
    at::Tensor shown = {};
    std::uint32_t version = 0;
  };
  // State from before begin_step. References to the tensor that is in .grad of `computed` during the step are dropped,
  // and set again by rollback().
  struct Before {
    at::Tensor gradient;
    Parts parts;
    std::array<bool, 4> was_in_grad = {};
    // Identity of the tensor that begin_step left in .grad of `computed`. Not dereferenced.
    const void* in_grad = nullptr;

    std::array<at::Tensor*, 4> references() { return {&gradient, &parts.reduced, &parts.unreduced, &parts.shown}; }
  };

  at::Tensor sum_of(std::size_t parameter, const Parts& parts) const;
  // Returns the parts that are left of a parameter, after whatever was done to .grad since the last step.
  Parts left_of(std::size_t parameter) const;

  std::vector<Parameter> parameters_;
  PartOf part_of_;
  std::vector<Parts> parts_;
  // One for each parameter during a step; empty outside of one.
  std::vector<Before> before_;
  bool was_reduced_ = false;
};

}  // namespace penstock::internal
