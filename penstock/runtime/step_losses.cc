#include "penstock/runtime/step_losses.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {

void StepLosses::begin_step(const StepInputs& inputs, StepOutputs& outputs, DeviceInputs& device_inputs) {
  inputs_ = &inputs;
  outputs_ = &outputs;
  device_inputs_ = &device_inputs;
  kept_losses_.clear();
  num_outputs_ = 0;
}

void StepLosses::add_output(PipelineStage& last_stage, int microbatch, const c10::IValue& output, const Args& args,
                            const Kwargs& kwargs) {
  compute_loss(last_stage, microbatch, output);
  if (!inputs_->options->return_outputs) return;
  keep_output(static_cast<std::size_t>(microbatch), map_leaves(output, [&](const c10::IValue& leaf) -> c10::IValue {
                const bool is_tensor = leaf.isTensor() && leaf.toTensor().defined();
                return is_tensor ? last_stage.detached(leaf.toTensor(), args, kwargs) : leaf;
              }));
}

void StepLosses::add_terms(PipelineStage& stage, int microbatch, const std::vector<at::Tensor>& terms, const Args& args,
                           const Kwargs& kwargs) {
  for (const at::Tensor& term : terms) {
    if (inputs_->autograd && term.requires_grad()) stage.add_root(microbatch, term, seed_of(term, microbatch));
    outputs_->loss_terms[static_cast<std::size_t>(microbatch)][stage.stage_index()].push_back(
        stage.detached(term, args, kwargs));
  }
}

void StepLosses::compute_loss(PipelineStage& last_stage, int microbatch, const c10::IValue& output) {
  const auto index = static_cast<std::size_t>(microbatch);
  if (!inputs_->loss || !(inputs_->has_target || inputs_->backward)) return;
  if (inputs_->weights.factors[index] == 0) return add_zero_loss(last_stage, microbatch, output);
  const c10::IValue& target = inputs_->microbatches[index].target;
  const Kwargs& loss_kwargs = inputs_->options->loss_kwargs;
  const Deadline deadline = deadline_after(inputs_->timeout);
  const auto moved_target = device_inputs_->moved(target, last_stage.device(), deadline);
  const auto moved_kwargs = device_inputs_->moved(loss_kwargs, last_stage.device(), deadline);
  const at::Tensor loss =
      inputs_->loss(output, moved_target ? *moved_target : target, moved_kwargs ? *moved_kwargs : loss_kwargs);
  if (!loss.defined() || loss.numel() != 1) {
    throw StageError(concat("the loss of microbatch ", microbatch, ": found ", describe(loss),
                            ", expected a tensor of one element."));
  }
  if (inputs_->autograd && loss.requires_grad()) last_stage.add_root(microbatch, loss, seed_of(loss, microbatch));
  outputs_->losses[index] = keep_loss(loss, index);
}

void StepLosses::add_zero_loss(PipelineStage& last_stage, int microbatch, const c10::IValue& output) {
  at::TensorOptions like = at::kFloat;
  for (const at::Tensor& tensor : extract_tensor_args(output)) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    like = at::TensorOptions(tensor.device()).dtype(c10::toRealValueType(tensor.scalar_type()));
    if (inputs_->autograd) last_stage.add_root(microbatch, tensor, at::zeros_like(tensor));
  }
  outputs_->losses[static_cast<std::size_t>(microbatch)] = at::zeros({}, like);
}

void StepLosses::keep_output(std::size_t microbatch, c10::IValue output) {
  outputs_->outputs[microbatch] = std::move(output);
  outputs_->has_outputs = true;
  ++num_outputs_;
  try {
    // The first output alone may be of a type that cannot be merged; all together show whether they fit.
    if (num_outputs_ == 1) require_mergeable({outputs_->outputs[microbatch]}, *inputs_->output_merge_spec);
    if (num_outputs_ == outputs_->outputs.size()) {
      require_mergeable(outputs_->outputs, *inputs_->output_merge_spec);
    }
  } catch (const ChunkError& error) {
    throw StageError(concat("the outputs of the microbatches cannot be merged: ", error.what()));
  }
}

at::Tensor StepLosses::keep_loss(const at::Tensor& loss, std::size_t microbatch) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (kept_losses_.empty()) {
    std::vector<std::int64_t> sizes = loss.sizes().vec();
    sizes.insert(sizes.begin(), inputs_->schedule->microbatches());
    kept_losses_ = at::empty(sizes, loss.options().requires_grad(false)).unbind();
  }
  const at::Tensor& kept = kept_losses_[microbatch];
  const bool fits =
      kept.sizes() == loss.sizes() && kept.scalar_type() == loss.scalar_type() && kept.device() == loss.device();
  return fits ? kept.copy_(loss) : loss.detach();
}

const at::Tensor& StepLosses::seed_of(const at::Tensor& loss, int microbatch) {
  const double factor = inputs_->weights.factors[static_cast<std::size_t>(microbatch)];
  const bool is_same = seed_.defined() && seed_factor_ == factor && seed_.scalar_type() == loss.scalar_type() &&
                       seed_.device() == loss.device() && seed_.sizes() == loss.sizes();
  if (!is_same) {
    seed_ = at::full(loss.sizes(), factor, loss.options().requires_grad(false));
    seed_factor_ = factor;
  }
  return seed_;
}

}  // namespace penstock::internal
