// Gradients of parameters that several ranks have, over the steps of an accumulation.
//
// A reduction is of what steps have contributed since the last one: gradients that were reduced before are set aside
// meanwhile, and added again. Between two steps .grad of what an optimizer sees holds all that has been accumulated: what
// was reduced, plus what this rank has contributed and not reduced yet. So whoever clears .grad, by setting it to none or
// by zeroing it in place, clears both, for that parameter alone. Any other change is taken as it is, where .grad holds
// either what was reduced or what was not. Where it is a sum of both, or shows only a shard's part of what waits, the parts
// cannot be told from it any more, and the next step is refused.
//
// Autograd does not count writes through .data(), so these show only where they change values: a shard that has no elements,
// or whose gradient is zero, does not show that it was cleared so. zero_() and setting .grad to none always do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace penstock::internal {

// Returns a gradient as it is summed over ranks, and as optimizers take it: that of an embedding may be sparse.
at::Tensor dense(const at::Tensor& gradient);

class AccumulatedGradients {
 public:
  struct Parameter {
    // Names it in errors, such as "stage 1, parameter 'w'".
    std::string name;
    // What an optimizer sees.
    at::Tensor visible;
    // Where backwards add to .grad: the same tensor, or the whole of which `visible` is a shard.
    at::Tensor computed;
  };
  // Returns the part of a gradient of `computed` that belongs to `visible`.
  using PartOf = std::function<at::Tensor(std::size_t parameter, const at::Tensor& gradient)>;

  // Parameters that are the same tensor count once. `part_of` is null when all are visible as they are computed.
  explicit AccumulatedGradients(const std::vector<Parameter>& parameters, PartOf part_of = nullptr);

  std::size_t size() const { return parameters_.size(); }
  const at::Tensor& computed(std::size_t parameter) const { return parameters_[parameter].computed; }

  // Leaves in .grad of `computed` what waits for a reduction, for backwards to add to. Throws StageError, before anything
  // has changed, when .grad was changed in a way that cannot be followed.
  void begin_step();
  // Takes the gradients that a reduction gave, undefined where no rank had one.
  void end_reduction(const std::vector<at::Tensor>& reduced);
  // After a step that succeeded, reduced or not: shows what has been accumulated.
  void end_step();
  // After a step that failed: the same tensors are in .grad as before begin_step, if that was called. The values of what
  // backwards have added to are the caller's to restore, and before this.
  void rollback();

 private:
  // What has been accumulated for a parameter.
  struct Parts {
    at::Tensor reduced = {};
    at::Tensor waiting = {};
    // What end_step left in .grad while something waits, and its version.
    at::Tensor shown = {};
    std::uint32_t version = 0;
  };
  struct Before {
    at::Tensor gradient;
    Parts parts;
  };

  at::Tensor sum_of(std::size_t parameter, const Parts& parts) const;
  // The parts that are left of a parameter, after whatever was done to .grad since the last step.
  Parts left_of(std::size_t parameter) const;

  std::vector<Parameter> parameters_;
  PartOf part_of_;
  std::vector<Parts> parts_;
  // Of the step that runs; empty outside of one.
  std::vector<Before> before_;
  bool was_reduced_ = false;
};

}  // namespace penstock::internal
