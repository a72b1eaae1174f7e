// Losses and outputs of one rank's stages during a step: computes the loss of each microbatch, gives it to the stage as
// the root of its backward, and keeps losses, outputs and loss terms for the result of the step.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <vector>

#include "penstock/runtime/device_inputs.h"
#include "penstock/runtime/step_state.h"
#include "penstock/stage/stage.h"
#include "penstock/tensor/microbatch.h"

namespace penstock::internal {

class StepLosses {
 public:
  // Forgets the previous step. All arguments outlive the step.
  void begin_step(const StepInputs& inputs, StepOutputs& outputs, DeviceInputs& device_inputs);

  // Takes the output of the last stage: computes its loss, and keeps it if the caller wants outputs. `args` and
  // `kwargs` are those of the forward. Throws StageError, and what the loss function throws.
  void add_output(PipelineStage& last_stage, int microbatch, const c10::IValue& output, const Args& args,
                  const Kwargs& kwargs);
  // Takes the loss terms that a stage's forward has added.
  void add_terms(PipelineStage& stage, int microbatch, const std::vector<at::Tensor>& terms, const Args& args,
                 const Kwargs& kwargs);

 private:
  void compute_loss(PipelineStage& last_stage, int microbatch, const c10::IValue& output);
  // Adds gradients of zero for a microbatch of weight 0, such as one whose targets are all ignored. The mean over
  // nothing may be NaN, and so is 0 times that, so its loss is not computed. The zeros begin at the outputs, so that
  // gradients have their shapes on all ranks.
  void add_zero_loss(PipelineStage& last_stage, int microbatch, const c10::IValue& output);
  // Keeps the output of a microbatch. Throws StageError if the outputs cannot be merged: before the last backward, so
  // that the step fails on all ranks.
  void keep_output(std::size_t microbatch, c10::IValue output);
  // Returns a copy of a loss that outlives its microbatch. The losses of a step lie in one tensor that is allocated
  // with the first: small tensors that stay between large ones that are freed would leave holes that no large one fits
  // in.
  at::Tensor keep_loss(const at::Tensor& loss, std::size_t microbatch);
  // Returns the gradient of a loss: its factor. The last one is reused while factor and shape stay the same.
  const at::Tensor& seed_of(const at::Tensor& loss, int microbatch);

  const StepInputs* inputs_ = nullptr;
  StepOutputs* outputs_ = nullptr;
  DeviceInputs* device_inputs_ = nullptr;
  at::Tensor seed_;
  double seed_factor_ = 0;
  // Memory of the kept losses, by microbatch.
  std::vector<at::Tensor> kept_losses_;
  std::size_t num_outputs_ = 0;
};

}  // namespace penstock::internal
