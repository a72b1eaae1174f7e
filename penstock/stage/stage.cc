#include "penstock/stage/stage.h"

#include <ATen/ops/clone.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/streams.h"
#include "penstock/stage/backward.h"
#include "penstock/stage/copy_on_write.h"
#include "penstock/stage/loss_terms.h"
#include "penstock/stage/parameter_sync.h"
#include "penstock/stage/recomputation.h"
#include "penstock/stage/routing.h"
#include "penstock/stage/saved_state.h"
#include "penstock/stage/stage_history.h"
#include "penstock/tensor/identity.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::concat;
using internal::memory_of;

namespace {

// Returns the tensors that a module returned, as the outputs that other stages can take.
std::vector<at::Tensor> outputs_of(const c10::IValue& value, int stage) {
  std::vector<c10::IValue> elements;
  switch (node_kind(value)) {
    case NodeKind::Tuple: elements = value.toTupleRef().elements().vec(); break;
    case NodeKind::List: elements = value.toListRef().vec(); break;
    default: elements = {value}; break;
  }
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    if (!elements[i].isTensor() && !elements[i].isNone()) {
      throw StageError(concat("stage ", stage, ", output ", i, ": found ", describe(elements[i]),
                              ", expected a tensor or None, which another stage can take."));
    }
    outputs.push_back(elements[i].isNone() ? at::Tensor() : elements[i].toTensor());
  }
  return outputs;
}

c10::IValue value_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

// True if a tensor of the value lies in this memory.
bool lies_in(const c10::IValue& value, const void* memory) {
  if (value.isTensor()) return memory_of(value.toTensor()) == memory;
  const std::vector<at::Tensor> tensors = extract_tensor_args(value);
  return std::ranges::any_of(tensors, [&](const at::Tensor& tensor) { return memory_of(tensor) == memory; });
}

void check(const std::string& subject, const std::vector<std::optional<TensorMeta>>& expected,
           const std::vector<at::Tensor>& found) {
  std::vector<std::optional<TensorMeta>> metas;
  for (const at::Tensor& tensor : found) {
    metas.push_back(tensor.defined() ? std::optional(TensorMeta(tensor)) : std::nullopt);
  }
  // Strides are not checked.
  for (std::size_t i = 0; i < std::min(metas.size(), expected.size()); ++i) {
    if (metas[i] && expected[i]) metas[i]->strides = expected[i]->strides;
  }
  validate_tensors_metadata(subject, expected, metas);
}

// A microbatch between its forward and the end of its backward.
struct SavedMicrobatch {
  SavedMicrobatch() = default;
  ~SavedMicrobatch() {
    if (recomputation) recomputation->expire();
  }
  SavedMicrobatch(const SavedMicrobatch&) = delete;
  SavedMicrobatch& operator=(const SavedMicrobatch&) = delete;

  // Number of tensors that came and left along each link.
  std::vector<std::size_t> received;
  std::vector<std::size_t> sent;
  // The outputs of this backward are the tensors of each outgoing link, one link after the other, then losses.
  std::optional<internal::StageBackward> backward;
  std::vector<at::Tensor> seeds;
  // True after the input half.
  bool between_halves = false;
  // The forward, if it will be recomputed.
  std::shared_ptr<internal::Recomputation> recomputation;
  // The weight step of a dw_builder, after the input half.
  std::function<void()> dw;
};

}  // namespace

struct PipelineStage::Impl {
  StageModule module;
  int index = 0;
  int stages = 0;
  StageOptions options;
  // Identities of the memory of parameters and buffers, which the module keeps alive.
  std::unordered_set<const void*> module_memory;
  // Tensors that a forward may write to.
  NamedTensors written;
  std::unique_ptr<internal::ParameterSync> sync;

  // Set by begin().
  Mode mode = Mode::Evaluation;
  std::optional<internal::StageRouting> routing;
  // For the parts of forwards that are recomputed.
  std::shared_ptr<internal::StageHistory> history;
  // Indexed by microbatch; null before the forward and after the backward.
  std::vector<std::unique_ptr<SavedMicrobatch>> microbatches;

  // True if the tensor lies in memory of the stage or of the caller, to which others may write.
  bool is_in_foreign_memory(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const {
    const void* const memory = memory_of(tensor);
    if (memory == nullptr) return false;
    return module_memory.contains(memory) ||
           std::ranges::any_of(args, [&](const c10::IValue& arg) { return lies_in(arg, memory); }) ||
           std::ranges::any_of(kwargs, [&](const auto& named) { return lies_in(named.second, memory); });
  }

  // `reader` is the computation that needs the forward, for the error.
  SavedMicrobatch& saved(int microbatch, const char* reader = "backward") const {
    const auto& found = microbatches.at(static_cast<std::size_t>(microbatch));
    if (!found) {
      throw StageError(
          concat("stage ", index, ", microbatch ", microbatch, ": its ", reader, " comes before its forward."));
    }
    return *found;
  }

  void release(int microbatch) { microbatches[static_cast<std::size_t>(microbatch)].reset(); }

  // Returns a gradient for each output of the microbatch's StageBackward.
  std::vector<at::Tensor> output_gradients(int microbatch, std::vector<Message> gradients) const {
    SavedMicrobatch& run = saved(microbatch);
    std::vector<at::Tensor> result;
    for (std::size_t link = 0; link < gradients.size(); ++link) {
      if (gradients[link].size() != run.sent[link]) {
        throw StageError(concat("stage ", index, ", microbatch ", microbatch, ": found ", gradients[link].size(),
                                " gradients from stage ", routing->links_out()[link].to, ", expected ", run.sent[link],
                                ", one for each tensor sent."));
      }
      std::ranges::move(gradients[link], std::back_inserter(result));
    }
    std::ranges::move(run.seeds, std::back_inserter(result));
    return result;
  }

  // Returns the arguments of the module: those of the model, or the received values that the stage takes.
  Args arguments(const std::vector<at::Tensor>& received, const std::vector<std::size_t>& counts,
                 const Args& args) const {
    if (index == 0) return args;
    Args arguments;
    for (const at::Tensor& tensor : routing->arguments(received, counts)) arguments.push_back(value_of(tensor));
    return arguments;
  }

  std::vector<Message> backward(int microbatch, std::vector<Message> gradients, bool is_full);
};

PipelineStage::PipelineStage(StageModule module, int stage_index, int num_stages, StageOptions options)
    : impl_(std::make_unique<Impl>()) {
  if (stage_index < 0 || stage_index >= num_stages) {
    throw StageError(
        concat("there is no stage ", stage_index, " of ", num_stages, "; expected 0 to ", num_stages - 1, "."));
  }
  if (!module.forward) throw StageError(concat("stage ", stage_index, ": StageModule::forward is not set."));
  impl_->module = std::move(module);
  impl_->index = stage_index;
  impl_->stages = num_stages;
  impl_->options = std::move(options);
  impl_->options.device = internal::with_index(impl_->options.device);
  for (const NamedTensors* named : {&impl_->module.parameters, &impl_->module.buffers, &impl_->module.state}) {
    for (const auto& [name, tensor] : *named) impl_->module_memory.insert(memory_of(tensor));
  }
  impl_->written = impl_->module.written_tensors();
  impl_->history = std::make_shared<internal::StageHistory>(impl_->module);
}

PipelineStage::~PipelineStage() = default;
PipelineStage::PipelineStage(PipelineStage&&) noexcept = default;
PipelineStage& PipelineStage::operator=(PipelineStage&&) noexcept = default;

int PipelineStage::stage_index() const {
  return impl_->index;
}

int PipelineStage::num_stages() const {
  return impl_->stages;
}

const StageModule& PipelineStage::module() const {
  return impl_->module;
}

at::Device PipelineStage::device() const {
  return impl_->options.device;
}

const NamedTensors& PipelineStage::parameters() const {
  return impl_->sync ? impl_->sync->parameters() : impl_->module.parameters;
}

void PipelineStage::set_sync(std::unique_ptr<internal::ParameterSync> sync) {
  impl_->sync = std::move(sync);
}

internal::ParameterSync* PipelineStage::sync() const {
  return impl_->sync.get();
}

void PipelineStage::begin(const Wiring& wiring, int microbatches, Mode mode) {
  impl_->routing.emplace(wiring, impl_->index);
  impl_->mode = mode;
  impl_->microbatches.clear();
  impl_->microbatches.resize(static_cast<std::size_t>(microbatches));
  if (impl_->sync && mode != Mode::Evaluation) impl_->sync->begin_step();
}

void PipelineStage::save(internal::SavedState& saved, bool has_overrides) const {
  for (const auto& [name, tensor] : impl_->written) saved.add_values(tensor);
  if (impl_->mode == Mode::Evaluation) return;
  const bool only_autograd_writes = impl_->mode == Mode::Autograd && !impl_->options.dw_builder && !has_overrides;
  std::unordered_set<const void*> seen;
  // The parameters that an optimizer steps may be shards of the module's.
  for (const NamedTensors* named : {&module().parameters, &parameters()}) {
    for (const auto& [name, parameter] : *named) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (only_autograd_writes) {
        saved.add_accumulated_gradient(parameter);
      } else {
        saved.add_gradient(parameter);
      }
    }
  }
}

void PipelineStage::end() {
  for (const auto& run : impl_->microbatches) {
    if (run && run->recomputation) run->recomputation->expire();
  }
  impl_->history->forget();
  if (impl_->sync) impl_->sync->end_step();
}

void PipelineStage::rollback() {
  impl_->microbatches.clear();
  impl_->history->forget();
  if (impl_->sync) impl_->sync->rollback();
}

at::Tensor PipelineStage::detached(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const {
  return impl_->is_in_foreign_memory(tensor, args, kwargs) ? tensor.detach().clone() : tensor.detach();
}

PipelineStage::Forwarded PipelineStage::forward(int microbatch, std::vector<Message> received, const Args& args,
                                                const Kwargs& kwargs, bool will_be_recomputed) {
  const StageOptions& options = impl_->options;
  const bool by_autograd = impl_->mode == Mode::Autograd;
  auto run = std::make_unique<SavedMicrobatch>();
  std::vector<at::Tensor> received_tensors;
  for (Message& message : received) {
    run->received.push_back(message.size());
    std::ranges::move(message, std::back_inserter(received_tensors));
  }
  const bool recomputed = by_autograd && (will_be_recomputed || options.recompute);
  if (recomputed && options.dw_builder) {
    throw StageError(concat("stage ", stage_index(), " has a dw_builder, and cannot be recomputed.\n",
                            "  Hint: leave out its R in the schedule, or StageOptions::recompute."));
  }
  // While these exist, the aliases below, which the module may write into, get memory of their own by a write.
  const std::vector<at::Tensor> kept = recomputed ? received_tensors : std::vector<at::Tensor>();
  std::vector<at::Tensor> tensors;
  std::vector<bool> needs_grad;
  for (const at::Tensor& tensor : received_tensors) {
    tensors.push_back(tensor.defined() ? internal::copy_on_write_alias(tensor) : tensor);
    needs_grad.push_back(by_autograd && tensor.defined() && tensor.requires_grad());
  }
  internal::StageInputs inputs(tensors, needs_grad);
  tensors = inputs.take();
  std::vector<internal::OutgoingTensor> forwarded =
      impl_->routing->forward_through(received_tensors, tensors, run->received);
  received_tensors.clear();

  Args arguments = impl_->arguments(tensors, run->received, args);
  if (options.input_metadata) {
    check(concat("stage ", stage_index(), ", input"), *options.input_metadata,
          extract_tensor_args(to_value(arguments)));
  }

  Forwarded result;
  {
    const internal::LossTermScope scope(result.losses);
    const internal::StageHistoryScope history(by_autograd ? impl_->history : nullptr);
    if (recomputed) {
      auto made = internal::forward_for_recomputation(
          impl_->module, arguments, kept, is_first() ? args : Args(), kwargs,
          [impl = impl_.get(), counts = run->received](const std::vector<at::Tensor>& again, const Args& given) {
            return impl->arguments(again, counts, given);
          });
      result.output = std::move(made.output);
      run->recomputation = std::move(made.recomputation);
    } else {
      result.output = impl_->module.forward(arguments, kwargs);
    }
  }
  arguments.clear();
  tensors.clear();

  std::vector<at::Tensor> outputs;
  if (!is_last()) outputs = outputs_of(result.output, stage_index());
  if (options.output_metadata) {
    check(concat("stage ", stage_index(), ", output"), *options.output_metadata,
          is_last() ? extract_tensor_args(result.output) : outputs);
  }
  const auto must_copy = [&](const at::Tensor& output) {
    return internal::is_copy_on_write_alias(output) || impl_->is_in_foreign_memory(output, args, kwargs);
  };
  std::vector<at::Tensor> in_graph;
  for (auto& link : impl_->routing->outgoing(outputs, std::move(forwarded), must_copy)) {
    Message& message = result.sent.emplace_back();
    for (internal::OutgoingTensor& tensor : link) {
      in_graph.push_back(std::move(tensor.in_graph));
      message.push_back(std::move(tensor.sent));
    }
    run->sent.push_back(message.size());
  }
  if (by_autograd) {
    run->backward.emplace(std::move(inputs), in_graph);
    impl_->microbatches[static_cast<std::size_t>(microbatch)] = std::move(run);
  }
  return result;
}

void PipelineStage::add_root(int microbatch, const at::Tensor& loss, const at::Tensor& seed) {
  SavedMicrobatch& run = impl_->saved(microbatch);
  run.backward->add_output(loss);
  run.seeds.push_back(seed);
}

std::vector<Message> PipelineStage::Impl::backward(int microbatch, std::vector<Message> gradients, bool is_full) {
  SavedMicrobatch& run = saved(microbatch);
  std::vector<at::Tensor> outputs = output_gradients(microbatch, std::move(gradients));
  // A weight step from dw_builder replaces the weight half: the module's own backward leaves the weights out.
  const bool has_dw = options.dw_builder != nullptr;
  run.between_halves = !is_full && !has_dw;
  std::vector<at::Tensor> inputs =
      is_full || has_dw ? run.backward->full(std::move(outputs)) : run.backward->input_half(std::move(outputs));
  std::vector<Message> messages;
  auto next = std::make_move_iterator(inputs.begin());
  for (const std::size_t count : run.received) {
    const auto end = next + static_cast<std::ptrdiff_t>(count);
    messages.emplace_back(next, end);
    next = end;
  }
  if (has_dw) {
    run.backward.reset();
    run.dw = options.dw_builder();
    if (is_full) std::exchange(run.dw, nullptr)();
  }
  if (is_full) release(microbatch);
  return messages;
}

std::vector<Message> PipelineStage::full_backward(int microbatch, std::vector<Message> gradients) {
  return impl_->backward(microbatch, std::move(gradients), /*is_full=*/true);
}

std::vector<Message> PipelineStage::input_backward(int microbatch, std::vector<Message> gradients) {
  return impl_->backward(microbatch, std::move(gradients), /*is_full=*/false);
}

void PipelineStage::weight_backward(int microbatch) {
  SavedMicrobatch& run = impl_->saved(microbatch);
  if (run.dw) {
    run.dw();
  } else if (run.between_halves) {
    run.backward->weight_half();
  } else {
    throw StageError(concat("stage ", stage_index(), ", microbatch ", microbatch,
                            ": its weight backward comes before its input backward."));
  }
  impl_->release(microbatch);
}

void PipelineStage::recompute(int microbatch) {
  // Other backwards save nothing, and compute what they need themselves.
  if (impl_->mode != Mode::Autograd) return;
  SavedMicrobatch& run = impl_->saved(microbatch, "recomputation");
  if (run.recomputation) run.recomputation->run();
}

bool PipelineStage::has_saved_activations(int microbatch) const {
  return impl_->microbatches.at(static_cast<std::size_t>(microbatch)) != nullptr;
}

}  // namespace penstock
