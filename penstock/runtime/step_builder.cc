#include "penstock/runtime/step_builder.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/transfer.h"
#include "penstock/runtime/chunk_aliases.h"
#include "penstock/runtime/digest.h"
#include "penstock/runtime/error.h"
#include "penstock/runtime/loss_weight.h"
#include "penstock/tensor/autocast_scope.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

std::int64_t next_pipeline_number() {
  static std::atomic<std::int64_t> count = 0;
  return ++count;
}

// Adds dtype, shape and strides of tensors, and other values themselves: a stage may return other shapes for another
// number.
void add_shapes(Digest& digest, const c10::IValue& value) {
  for_each_leaf(value, Path(""), [&](const c10::IValue& leaf, const Path&) {
    if (!leaf.isTensor() || !leaf.toTensor().defined()) {
      digest.add(leaf.isTensor() ? "none" : describe(leaf));
      return;
    }
    const at::Tensor& tensor = leaf.toTensor();
    digest.add(static_cast<std::int64_t>(tensor.scalar_type())).add(tensor.requires_grad() ? 1 : 0).add(tensor.dim());
    for (std::int64_t i = 0; i < tensor.dim(); ++i) digest.add(tensor.size(i)).add(tensor.stride(i));
  });
}

void add_shapes(Digest& digest, const Batch& batch) {
  for (const c10::IValue& value : batch.args) add_shapes(digest, value);
  for (const auto& [stage, kwargs] : batch.kwargs) {
    digest.add(stage);
    for (const auto& [name, value] : kwargs) add_shapes(digest.add(name), value);
  }
  add_shapes(digest, batch.target);
}

}  // namespace

StepBuilder::StepBuilder(const PipelineOptions& options, const LocalRanks& ranks)
    : options_(options), ranks_(ranks), pipeline_number_(next_pipeline_number()) {}

std::shared_ptr<Step> StepBuilder::build(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                                         const StepOptions& step_options, bool backward, std::int64_t count) const {
  const Batch batch = batch_of(args, kwargs, target, step_options);
  require_weights(step_options);
  if (backward) require_loss_and_target(batch);
  const int num_replicas = static_cast<int>(ranks_.models().size());
  std::vector<Batch> parts{batch};
  if (num_replicas > 1) parts = split_batch(batch, options_.specs, num_replicas, "replicas");

  const auto microbatches = static_cast<std::size_t>(num_microbatches());
  auto numbered = std::make_shared<StepOptions>(step_options);
  numbered->number = step_options.number.value_or(count);
  auto step = std::make_shared<Step>(ranks_.size());
  StepInputs common{.wiring = &ranks_.models().front().wiring(),
                    .backward = backward,
                    .autograd = backward && options_.backward_requires_autograd,
                    .has_target = !batch.target.isNone(),
                    .loss = options_.loss,
                    .options = std::move(numbered),
                    .output_merge_spec = &options_.output_merge_spec,
                    // Thread ranks need no shapes before a message.
                    .signature = ranks_.are_threads() ? 0 : signature_of(batch, backward),
                    .timeout = options_.timeout};
  for (std::size_t replica = 0; replica < parts.size(); ++replica) {
    StepInputs inputs = common;
    inputs.microbatches = split_batch(parts[replica], options_.specs, num_microbatches(), "microbatches");
    alias_chunks(inputs.microbatches, parts[replica]);
    inputs.weights = weights_of(step_options, replica);
    if (options_.loss_weight && inputs.has_target) weigh(inputs, options_.loss_weight);
    // Each replica draws its own random numbers.
    inputs.seed = options_.seed + static_cast<std::uint64_t>(ranks_.first_replica()) + replica;
    step->replicas.push_back(
        {.inputs = std::move(inputs),
         .outputs = StepOutputs(microbatches),
         .record = Record(static_cast<std::size_t>(ranks_.ranks_per_replica())),
         .device_times = std::vector<DeviceTimes>(static_cast<std::size_t>(ranks_.ranks_per_replica()))});
  }
  if (options_.loss_weight && ranks_.are_threads()) set_all_factors(step->replicas);
  step->devices = devices_with(batch, step_options);
  if (backward) {
    step->batch_values = {to_value(batch.args), batch.target, to_value(step_options.loss_kwargs)};
    for (const auto& [stage, values] : batch.kwargs) step->batch_values.push_back(to_value(values));
  }
  return step;
}

std::vector<at::Device> StepBuilder::devices_with(const Batch& batch, const StepOptions& step_options) const {
  std::vector<at::Device> devices = ranks_.devices();
  const auto add = [&](const c10::IValue& value) {
    const std::vector<at::Device> found = devices_of(extract_tensor_args(value));
    for (const at::Device device : found) {
      if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
    }
  };
  add(to_value(batch.args));
  for (const auto& [stage, kwargs] : batch.kwargs) add(to_value(kwargs));
  add(batch.target);
  add(to_value(step_options.loss_kwargs));
  return devices;
}

Batch StepBuilder::batch_of(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                            const StepOptions& step_options) const {
  Batch batch;
  if (ranks_.has_stage(0)) {
    batch.args = args;
    batch.kwargs[0] = kwargs;
  }
  if (ranks_.has_stage(last_stage())) batch.target = target;
  for (const auto& [stage, values] : step_options.stage_kwargs) {
    if (stage < 1 || stage > last_stage()) {
      throw PipelineError(concat("there are keyword arguments for stage ", stage, "; expected a stage from 1 to ",
                                 last_stage(), ".\n  Hint: pass those of stage 0 as `kwargs`."));
    }
    if (ranks_.has_stage(stage)) batch.kwargs[stage] = values;
  }
  return batch;
}

void StepBuilder::require_loss_and_target(const Batch& batch) const {
  if (!options_.functions.overrides.empty() || !ranks_.has_stage(last_stage())) return;
  if (!options_.loss && !batch.target.isNone()) {
    throw PipelineError(concat("there is a target, ", describe(batch.target),
                               ", and no loss function that compares the output with it.\n  Hint: set "
                               "PipelineOptions::loss; eval needs neither."));
  }
  if (!options_.loss || !batch.target.isNone()) return;
  const std::string first = batch.args.empty() ? "" : concat(" (args[0] is ", describe(batch.args.front()), ")");
  throw PipelineError(concat("the target is missing: there is a loss function, and the arguments", first,
                             " come without anything to compare the output with.\n  Hint: step(args, kwargs, target); "
                             "at::Tensor() is the target of a loss that takes none."));
}

void StepBuilder::require_weights(const StepOptions& step_options) const {
  const std::size_t expected = static_cast<std::size_t>(num_microbatches()) * ranks_.models().size();
  if (step_options.weights.empty() || step_options.weights.size() == expected) return;
  throw PipelineError(concat("there are ", step_options.weights.size(), " weights for ", expected, " microbatches."));
}

std::uint64_t StepBuilder::signature_of(const Batch& batch, bool backward) const {
  Digest signature;
  signature.add(pipeline_number_).add(backward ? 1 : 0).add(batch.target.isNone() ? 0 : 1);
  AutocastState().for_each_type([&](at::ScalarType dtype, bool enabled) {
    signature.add(enabled ? 1 : 0).add(static_cast<std::int64_t>(dtype));
  });
  add_shapes(signature, batch);
  // Activations of frozen parameters require no gradient.
  for (const PipelineStage& stage : ranks_.models().front().stages()) {
    for (const auto& [name, parameter] : stage.module().parameters) signature.add(parameter.requires_grad() ? 1 : 0);
  }
  return signature.value();
}

LossWeights StepBuilder::weights_of(const StepOptions& step_options, std::size_t replica) const {
  const auto count = static_cast<std::size_t>(num_microbatches());
  LossWeights weights;
  weights.factors.assign(count, options_.scale_grads ? 1.0 / static_cast<double>(count) : 1.0);
  if (options_.loss_weight) {
    weights.weights.assign(count, 0);
    weights.total = step_options.total_weight;
  }
  weights.scale_grads = options_.scale_grads;
  weights.has_given_factors = !step_options.weights.empty();
  if (weights.has_given_factors) {
    std::copy_n(step_options.weights.begin() + static_cast<std::ptrdiff_t>(replica * count), count,
                weights.factors.begin());
  }
  return weights;
}

void StepBuilder::set_all_factors(std::vector<ReplicaStep>& replicas) const {
  double total = 0;
  for (const ReplicaStep& replica : replicas) {
    for (const double weight : replica.inputs.weights.weights) total += weight;
  }
  for (ReplicaStep& replica : replicas) {
    LossWeights& weights = replica.inputs.weights;
    set_factors(weights, weights.total.value_or(total), static_cast<int>(replicas.size()));
  }
}

}  // namespace penstock::internal
