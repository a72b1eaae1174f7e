#include "penstock/stage/stage.h"

#include <ATen/ops/clone.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "penstock/stage/backward.h"
#include "penstock/stage/copy_on_write.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

// The losses that the forward on this thread hands in; null outside of one.
thread_local std::vector<at::Tensor>* handed_in = nullptr;

class HandingIn {
 public:
  explicit HandingIn(std::vector<at::Tensor>& losses) : outer_(std::exchange(handed_in, &losses)) {}
  ~HandingIn() { handed_in = outer_; }
  HandingIn(const HandingIn&) = delete;
  HandingIn& operator=(const HandingIn&) = delete;

 private:
  std::vector<at::Tensor>* outer_;
};

// What another stage gets: the same memory, without history. It requires grad if the other stage is to give a gradient
// for it.
at::Tensor handed_over(const at::Tensor& tensor, bool copy) {
  if (!tensor.defined()) return tensor;
  at::Tensor result = copy ? tensor.detach().clone() : tensor.variable_data();
  if (tensor.requires_grad()) result.requires_grad_();
  return result;
}

// The same value with the same place in the graph, whatever the stage then writes into the first.
at::Tensor same_place(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.requires_grad()) return tensor;
  at::Tensor result = tensor.variable_data();
  torch::autograd::impl::set_gradient_edge(result, torch::autograd::impl::gradient_edge(tensor));
  return result;
}

std::string place(int stage) {
  return "stage " + std::to_string(stage);
}

// What a module gave, as the outputs that other stages can take.
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
      throw StageError(place(stage) + ", output " + std::to_string(i) + ": found " + describe(elements[i]) +
                       ", expected a tensor or None, which is what can go to another stage.");
    }
    outputs.push_back(elements[i].isNone() ? at::Tensor() : elements[i].toTensor());
  }
  return outputs;
}

c10::IValue value_of(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

const void* memory_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// Whether a tensor of the value lies there.
bool has_memory(const c10::IValue& value, const void* memory) {
  if (value.isTensor()) return memory_of(value.toTensor()) == memory;
  const std::vector<at::Tensor> tensors = extract_tensor_args(value);
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& one) { return has_memory(one, memory); });
}

void check(const std::string& what, const std::vector<std::optional<TensorMeta>>& expected,
           const std::vector<at::Tensor>& found) {
  std::vector<std::optional<TensorMeta>> metas;
  for (const at::Tensor& tensor : found) {
    metas.push_back(tensor.defined() ? std::optional(TensorMeta(tensor)) : std::nullopt);
  }
  // Strides are as they come.
  for (std::size_t i = 0; i < std::min(metas.size(), expected.size()); ++i) {
    if (metas[i] && expected[i]) metas[i]->strides = expected[i]->strides;
  }
  validate_tensors_metadata(what, expected, metas);
}

}  // namespace

// One microbatch on its way.
struct PipelineStage::Run {
  // How many tensors came along each link.
  std::vector<std::size_t> received;
  std::vector<std::size_t> sent;
  // Its outputs are each link's tensors, one behind the other, then losses.
  std::optional<StageBackward> backward;
  std::vector<at::Tensor> seeds;
  // Whether the input half has run.
  bool between_halves = false;
  std::function<void()> dw;
};

PipelineStage::PipelineStage(StageModule module, int stage_index, int num_stages, StageOptions options)
    : module_(std::move(module)), index_(stage_index), stages_(num_stages), options_(std::move(options)) {
  if (stage_index < 0 || stage_index >= num_stages) {
    throw StageError("there is no stage " + std::to_string(stage_index) + " of " + std::to_string(num_stages) +
                     "; they go from 0 to " + std::to_string(num_stages - 1) + ".");
  }
  if (!module_.forward) throw StageError(place(index_) + " has no function for its forward.");
  for (const auto* named : {&module_.parameters, &module_.buffers}) {
    for (const auto& [name, tensor] : *named) own_memory_.insert(memory_of(tensor));
  }
}

PipelineStage::~PipelineStage() = default;
PipelineStage::PipelineStage(PipelineStage&&) noexcept = default;
PipelineStage& PipelineStage::operator=(PipelineStage&&) noexcept = default;

void PipelineStage::begin(const Wiring& wiring, int microbatches, Mode mode) {
  links_in_ = wiring.links_to(index_);
  links_out_ = wiring.links_from(index_);
  arguments_ = wiring.arguments(index_);
  mode_ = mode;
  runs_.clear();
  runs_.resize(static_cast<std::size_t>(microbatches));
  if (sync_ && mode != Mode::Evaluation) sync_->begin_step();
}

void PipelineStage::save(SavedState& saved, bool has_user_functions) const {
  for (const auto& [name, buffer] : module_.buffers) saved.add_values(buffer);
  if (mode_ == Mode::Evaluation) return;
  const bool only_autograd_writes = mode_ == Mode::Autograd && !options_.dw_builder && !has_user_functions;
  std::unordered_set<const void*> seen;
  // Those that an optimizer steps may be shards of the module's.
  for (const NamedTensors* named : {&module_.parameters, &parameters()}) {
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
  if (sync_) sync_->end_step();
}

void PipelineStage::rollback() {
  runs_.clear();
  if (sync_) sync_->rollback();
}

std::size_t PipelineStage::position_of(const StageOutput& value, const Run& run) const {
  std::size_t first = 0;
  for (std::size_t link = 0; link < links_in_.size(); ++link) {
    const auto& values = links_in_[link].values;
    const auto count = run.received[link];
    if (!values) {
      if (value.stage == links_in_[link].from && static_cast<std::size_t>(value.output) < count) {
        return first + static_cast<std::size_t>(value.output);
      }
    } else {
      const auto found = std::find(values->begin(), values->end(), value);
      if (found != values->end()) return first + static_cast<std::size_t>(found - values->begin());
    }
    first += count;
  }
  throw StageError(place(index_) + " should have output " + std::to_string(value.output) + " of stage " +
                   std::to_string(value.stage) + ", which that stage does not give.");
}

std::vector<PipelineStage::Handed> PipelineStage::hand_on(const std::vector<at::Tensor>& tensors,
                                                          const std::vector<at::Tensor>& lent, const Run& run) const {
  std::vector<Handed> handed_on;
  for (const Wiring::Link& link : links_out_) {
    if (!link.values) continue;
    for (const StageOutput& value : *link.values) {
      if (value.stage == index_) continue;
      const std::size_t at = position_of(value, run);
      const bool borrowed = tensors[at].defined() && is_copy_on_write_alias(tensors[at]);
      handed_on.push_back({same_place(tensors[at]), handed_over(lent[at], /*copy=*/!borrowed)});
    }
  }
  return handed_on;
}

bool PipelineStage::is_of_others(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const {
  const void* const memory = memory_of(tensor);
  if (memory == nullptr) return false;
  return own_memory_.contains(memory) ||
         std::any_of(args.begin(), args.end(), [&](const c10::IValue& arg) { return has_memory(arg, memory); }) ||
         std::any_of(kwargs.begin(), kwargs.end(), [&](const auto& named) { return has_memory(named.second, memory); });
}

at::Tensor PipelineStage::kept(const at::Tensor& tensor, const Args& args, const Kwargs& kwargs) const {
  return is_of_others(tensor, args, kwargs) ? tensor.detach().clone() : tensor.detach();
}

std::vector<std::vector<PipelineStage::Handed>> PipelineStage::hand_over(const std::vector<at::Tensor>& outputs,
                                                                         std::vector<Handed> handed_on,
                                                                         const Args& args, const Kwargs& kwargs) const {
  const auto must_copy = [&](const at::Tensor& output) {
    return output.defined() && (is_copy_on_write_alias(output) || is_of_others(output, args, kwargs));
  };
  const auto own = [&](const at::Tensor& output) { return Handed{output, handed_over(output, must_copy(output))}; };
  auto next_handed_on = handed_on.begin();
  std::vector<std::vector<Handed>> by_link;
  for (const Wiring::Link& link : links_out_) {
    std::vector<Handed>& handed = by_link.emplace_back();
    if (!link.values) {
      std::transform(outputs.begin(), outputs.end(), std::back_inserter(handed), own);
      continue;
    }
    for (const StageOutput& value : *link.values) {
      if (value.stage != index_) {
        handed.push_back(std::move(*next_handed_on++));
        continue;
      }
      if (static_cast<std::size_t>(value.output) >= outputs.size()) {
        throw StageError(place(index_) + " gives " + std::to_string(outputs.size()) + " outputs; stage " +
                         std::to_string(link.to) + " asks for output " + std::to_string(value.output) + ".");
      }
      handed.push_back(own(outputs[static_cast<std::size_t>(value.output)]));
    }
  }
  return by_link;
}

PipelineStage::Forwarded PipelineStage::forward(int microbatch, std::vector<Message> received, const Args& args,
                                                const Kwargs& kwargs) {
  auto run = std::make_unique<Run>();
  std::vector<at::Tensor> lent;
  for (Message& message : received) {
    run->received.push_back(message.size());
    std::move(message.begin(), message.end(), std::back_inserter(lent));
  }
  std::vector<at::Tensor> tensors;
  std::vector<bool> needs_grad;
  for (const at::Tensor& tensor : lent) {
    tensors.push_back(tensor.defined() ? copy_on_write_alias(tensor) : tensor);
    needs_grad.push_back(mode_ == Mode::Autograd && tensor.defined() && tensor.requires_grad());
  }
  StageInputs inputs(tensors, needs_grad);
  tensors = inputs.take();
  std::vector<Handed> handed_on = hand_on(tensors, lent, *run);
  lent.clear();

  Args arguments;
  if (is_first()) {
    arguments = args;
  } else if (arguments_) {
    for (const StageOutput& value : *arguments_) arguments.push_back(value_of(tensors[position_of(value, *run)]));
  } else {
    for (const at::Tensor& tensor : tensors) arguments.push_back(value_of(tensor));
  }
  if (options_.input_metadata) {
    check(place(index_) + ", input", *options_.input_metadata, extract_tensor_args(to_value(arguments)));
  }

  Forwarded result;
  {
    const HandingIn handing_in(result.losses);
    result.output = module_.forward(arguments, kwargs);
  }
  arguments.clear();
  tensors.clear();

  std::vector<at::Tensor> outputs;
  if (!is_last()) outputs = outputs_of(result.output, index_);
  if (options_.output_metadata) {
    check(place(index_) + ", output", *options_.output_metadata,
          is_last() ? extract_tensor_args(result.output) : outputs);
  }
  std::vector<at::Tensor> in_graph;
  for (std::vector<Handed>& link : hand_over(outputs, std::move(handed_on), args, kwargs)) {
    Message& message = result.sent.emplace_back();
    for (Handed& handed : link) {
      in_graph.push_back(std::move(handed.in_graph));
      message.push_back(std::move(handed.sent));
    }
    run->sent.push_back(message.size());
  }
  if (mode_ == Mode::Autograd) {
    run->backward.emplace(std::move(inputs), in_graph);
    runs_[static_cast<std::size_t>(microbatch)] = std::move(run);
  }
  return result;
}

PipelineStage::Run& PipelineStage::run_of(int microbatch) {
  const auto& run = runs_.at(static_cast<std::size_t>(microbatch));
  if (!run) {
    throw StageError(place(index_) + ", microbatch " + std::to_string(microbatch) +
                     ": there is no forward for its backward.");
  }
  return *run;
}

void PipelineStage::add_root(int microbatch, const at::Tensor& loss, const at::Tensor& seed) {
  Run& run = run_of(microbatch);
  run.backward->add_output(loss);
  run.seeds.push_back(seed);
}

std::vector<Message> PipelineStage::backward(int microbatch, std::vector<Message> gradients, bool whole) {
  Run& run = run_of(microbatch);
  std::vector<at::Tensor> of_outputs;
  for (std::size_t link = 0; link < gradients.size(); ++link) {
    if (gradients[link].size() != run.sent[link]) {
      throw StageError(place(index_) + ", microbatch " + std::to_string(microbatch) + ": stage " +
                       std::to_string(links_out_[link].to) + " gave " + std::to_string(gradients[link].size()) +
                       " gradients for " + std::to_string(run.sent[link]) + " tensors.");
    }
    std::move(gradients[link].begin(), gradients[link].end(), std::back_inserter(of_outputs));
  }
  std::move(run.seeds.begin(), run.seeds.end(), std::back_inserter(of_outputs));

  // A supplied weight step takes the place of the second half: the module's own backward then leaves the weights out.
  const bool supplied = options_.dw_builder != nullptr;
  run.between_halves = !whole && !supplied;
  std::vector<at::Tensor> of_inputs =
      whole || supplied ? run.backward->full(std::move(of_outputs)) : run.backward->input_half(std::move(of_outputs));
  std::vector<Message> messages;
  std::size_t next = 0;
  for (const std::size_t count : run.received) {
    const auto first = of_inputs.begin() + static_cast<std::ptrdiff_t>(next);
    messages.emplace_back(std::make_move_iterator(first),
                          std::make_move_iterator(first + static_cast<std::ptrdiff_t>(count)));
    next += count;
  }
  if (supplied) {
    run.backward.reset();
    run.dw = options_.dw_builder();
    if (whole) std::exchange(run.dw, nullptr)();
  }
  if (whole) runs_[static_cast<std::size_t>(microbatch)].reset();
  return messages;
}

std::vector<Message> PipelineStage::full_backward(int microbatch, std::vector<Message> gradients) {
  return backward(microbatch, std::move(gradients), /*whole=*/true);
}

std::vector<Message> PipelineStage::input_backward(int microbatch, std::vector<Message> gradients) {
  return backward(microbatch, std::move(gradients), /*whole=*/false);
}

void PipelineStage::weight_backward(int microbatch) {
  Run& run = run_of(microbatch);
  if (run.dw) {
    run.dw();
  } else if (run.between_halves) {
    run.backward->weight_half();
  } else {
    throw StageError(place(index_) + ", microbatch " + std::to_string(microbatch) +
                     ": its weight gradients come after its input gradients.");
  }
  runs_[static_cast<std::size_t>(microbatch)].reset();
}

bool PipelineStage::keeps(int microbatch) const {
  return runs_.at(static_cast<std::size_t>(microbatch)) != nullptr;
}

void add_loss(const at::Tensor& term) {
  if (handed_in == nullptr) throw StageError("add_loss is called inside a stage's forward.");
  handed_in->push_back(term);
}

}  // namespace penstock
