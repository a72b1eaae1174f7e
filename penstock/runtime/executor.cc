#include "penstock/runtime/executor.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "penstock/stage/parameter_sync.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/random_scope.h"

namespace penstock {
namespace {

// Sparse and other tensors that have no number of bytes are not counted.
std::int64_t bytes_of(const std::vector<Message>& messages) {
  std::int64_t bytes = 0;
  for (const Message& message : messages) {
    for (const at::Tensor& tensor : message) {
      if (tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested())
        bytes += static_cast<std::int64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

std::int64_t nanoseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

void Executor::begin(const StepWork& work) {
  using Mode = PipelineStage::Mode;
  const Mode mode = work.autograd ? Mode::Autograd : work.backward ? Mode::UserBackward : Mode::Evaluation;
  for (const auto& [index, stage] : stages_) stage->begin(*work.wiring, work.schedule->microbatches(), mode);
}

void Executor::begin_sums(const StepWork& work) {
  if (!work.backward) return;
  for (StageSum& one : *sums_) one.sum.begin_step();
}

void Executor::save(SavedState& saved) const {
  const bool has_functions = !functions_->instead.empty() || functions_->before || functions_->after;
  for (const auto& [index, stage] : stages_) stage->save(saved, has_functions);
}

void Executor::end() {
  for (const auto& [index, stage] : stages_) stage->end();
  for (StageSum& one : *sums_) one.sum.end_step();
}

void Executor::rollback() {
  for (StageSum& one : *sums_) one.sum.rollback();
  for (const auto& [index, stage] : stages_) stage->rollback();
}

void Executor::run(StepWork& work, std::vector<ActionRecord>& record, Progress& progress) {
  work_ = &work;
  transport_->begin_step(work.signature);
  const Schedule& schedule = *work.schedule;
  const auto cells = schedule.graph().edges().size() * static_cast<std::size_t>(schedule.microbatches());
  for (std::vector<Message>* places : {&activations_, &gradients_}) {
    places->clear();
    places->resize(cells);
  }
  loss_places_.clear();
  outputs_kept_ = 0;

  const std::span<const Action> actions = schedule.actions(rank());
  record.assign(actions.size(), {});
  const c10::AutoGradMode grad_mode(work.autograd);
  std::int64_t now = nanoseconds(Clock::now() - work.began);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    progress.since.store(now, std::memory_order_relaxed);
    progress.position.store(static_cast<int>(i), std::memory_order_release);
    now_ = &record[i];
    now_->start = now;
    if (functions_->before) functions_->before(rank(), actions[i]);
    {
      at::RecordFunction guard(at::RecordScope::USER_SCOPE);
      if (guard.isActive()) guard.before("PP:" + to_string(actions[i]));
      run_action(actions[i]);
    }
    if (functions_->after) functions_->after(rank(), actions[i]);
    now = nanoseconds(Clock::now() - work.began);
    now_->end = now;
  }
  const auto end = static_cast<int>(actions.size());
  progress.since.store(now, std::memory_order_relaxed);
  progress.position.store(end, std::memory_order_release);
  finish_reductions();
  transport_->end_step(deadline());
  progress.position.store(end + 1, std::memory_order_release);
}

void Executor::run_action(const Action& action) {
  if (action.is_compute() && !action.is_overlap()) {
    if (ParameterSync* const sync = stages_.at(action.stage)->sync()) sync->finish_unshard(deadline());
  }
  const auto instead = functions_->instead.find(action.computation);
  if (instead == functions_->instead.end()) return run_own(action);
  ActionContext context(*this);
  instead->second(action, context);
}

void Executor::run_own(const Action& action) {
  switch (action.computation) {
    case Computation::Forward: forward(action); break;
    case Computation::InputBackward:
    case Computation::FullBackward: backward(action); break;
    case Computation::WeightBackward: stages_.at(action.stage)->weight_backward(action.microbatch); break;
    case Computation::Overlap: for_each_part(action, [this](const Action& part) { run_action(part); }); break;
    case Computation::SendForward:
    case Computation::SendBackward: send(action); break;
    case Computation::RecvForward:
    case Computation::RecvBackward: post_receive(action); break;
    case Computation::Unshard:
    case Computation::Reshard:
    case Computation::ReduceGrad:
    case Computation::SumShared: change_parameters(action); break;
  }
}

void Executor::change_parameters(const Action& action) {
  ParameterSync* const sync = stages_.at(action.stage)->sync();
  switch (action.computation) {
    case Computation::Unshard:
      if (sync != nullptr) sync->unshard();
      break;
    case Computation::Reshard:
      if (sync != nullptr) sync->reshard();
      break;
    case Computation::ReduceGrad:
      if (sync != nullptr) sync->reduce();
      break;
    default:
      for (StageSum& one : *sums_) {
        if (one.group == work_->schedule->graph().group_of(action.stage)) one.sum.reduce(deadline());
      }
  }
}

void Executor::finish_reductions() {
  for (const auto& [index, stage] : stages_) {
    if (stage->sync() != nullptr) stage->sync()->finish_reduce(deadline());
  }
}

void Executor::forward(const Action& action) {
  static const Args kNoArgs;
  static const Kwargs kNoKwargs;
  const auto microbatch = static_cast<std::size_t>(action.microbatch);
  const Batch& batch = work_->microbatches[microbatch];
  PipelineStage& stage = *stages_.at(action.stage);
  std::vector<Message> received = collect(action.stage, action.microbatch, Way::Forward);
  const auto named = batch.kwargs.find(action.stage);
  const Args& args = stage.is_first() ? batch.args : kNoArgs;
  const Kwargs& kwargs = named == batch.kwargs.end() ? kNoKwargs : named->second;
  PipelineStage::Forwarded result;
  {
    const RandomScope scope(work_->seed, work_->step, action.microbatch, action.stage);
    result = stage.forward(action.microbatch, std::move(received), args, kwargs);
  }
  if (stage.is_last()) {
    compute_loss(action.microbatch, result.output);
    if (work_->keep_outputs) {
      keep_output(microbatch, map_leaves(result.output, [&](const c10::IValue& leaf) -> c10::IValue {
                    const bool is_tensor = leaf.isTensor() && leaf.toTensor().defined();
                    return is_tensor ? stage.detached(leaf.toTensor(), args, kwargs) : leaf;
                  }));
    }
  }
  for (const at::Tensor& term : result.losses) {
    if (work_->autograd && term.requires_grad()) {
      stage.add_root(action.microbatch, term, seed_of(term, action.microbatch));
    }
    work_->loss_terms[microbatch][action.stage].push_back(stage.detached(term, args, kwargs));
  }
  put(action.stage, action.microbatch, Way::Forward, std::move(result.sent));
}

const at::Tensor& Executor::seed_of(const at::Tensor& loss, int microbatch) {
  const double weight = work_->weights[static_cast<std::size_t>(microbatch)];
  const bool same = seed_.defined() && seed_weight_ == weight && seed_.scalar_type() == loss.scalar_type() &&
                    seed_.device() == loss.device() && seed_.sizes() == loss.sizes();
  if (!same) {
    seed_ = at::full(loss.sizes(), weight, loss.options().requires_grad(false));
    seed_weight_ = weight;
  }
  return seed_;
}

// A microbatch that counts nothing, such as one whose targets are all ignored: its loss is the mean of nothing, which may
// be NaN, and 0 times that too. Gradients of zero begin at the outputs, so that they have their shapes on all ranks.
void Executor::add_nothing(int microbatch, const c10::IValue& output) {
  at::TensorOptions like = at::kFloat;
  for (const at::Tensor& tensor : extract_tensor_args(output)) {
    if (!tensor.defined() || !tensor.requires_grad()) continue;
    like = at::TensorOptions(tensor.device()).dtype(c10::toRealValueType(tensor.scalar_type()));
    if (!work_->autograd) continue;
    stages_.at(work_->schedule->stages() - 1)->add_root(microbatch, tensor, at::zeros_like(tensor));
  }
  work_->losses[static_cast<std::size_t>(microbatch)] = at::zeros({}, like);
}

void Executor::compute_loss(int microbatch, const c10::IValue& output) {
  const auto at = static_cast<std::size_t>(microbatch);
  const bool has_loss = work_->loss && (work_->has_target || work_->backward);
  if (has_loss && work_->weights[at] == 0) {
    add_nothing(microbatch, output);
  } else if (has_loss) {
    const at::Tensor loss = work_->loss(output, work_->microbatches[at].target, work_->loss_kwargs);
    if (!loss.defined() || loss.numel() != 1) {
      throw StageError("the loss of microbatch " + std::to_string(microbatch) + ": found " + describe(loss) +
                       ", expected a tensor of one element.");
    }
    if (work_->autograd && loss.requires_grad()) {
      stages_.at(work_->schedule->stages() - 1)->add_root(microbatch, loss, seed_of(loss, microbatch));
    }
    work_->losses[at] = kept_loss(loss, at);
  }
}

void Executor::keep_output(std::size_t microbatch, c10::IValue output) {
  work_->outputs[microbatch] = std::move(output);
  work_->has_outputs = true;
  ++outputs_kept_;
  try {
    // One alone may be of a kind that nothing can be merged of; all together show whether they fit.
    if (outputs_kept_ == 1) require_mergeable({work_->outputs[microbatch]}, *work_->output_merge_spec);
    if (outputs_kept_ == work_->outputs.size()) require_mergeable(work_->outputs, *work_->output_merge_spec);
  } catch (const ChunkError& error) {
    throw StageError(std::string("the outputs of the microbatches cannot be merged: ") + error.what());
  }
}

at::Tensor Executor::kept_loss(const at::Tensor& loss, std::size_t microbatch) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (loss_places_.empty()) {
    std::vector<std::int64_t> sizes = loss.sizes().vec();
    sizes.insert(sizes.begin(), work_->schedule->microbatches());
    loss_places_ = at::empty(sizes, loss.options().requires_grad(false)).unbind();
  }
  const at::Tensor& place = loss_places_[microbatch];
  const bool fits =
      place.sizes() == loss.sizes() && place.scalar_type() == loss.scalar_type() && place.device() == loss.device();
  return fits ? place.copy_(loss) : loss.detach();
}

void Executor::backward(const Action& action) {
  PipelineStage& stage = *stages_.at(action.stage);
  std::vector<Message> gradients = collect(action.stage, action.microbatch, Way::Backward);
  put(action.stage, action.microbatch, Way::Backward,
      action.computation == Computation::FullBackward ? stage.full_backward(action.microbatch, std::move(gradients))
                                                      : stage.input_backward(action.microbatch, std::move(gradients)));
}

Message& Executor::place_of(Way way, int edge, int microbatch) {
  const auto at = static_cast<std::size_t>(edge) * static_cast<std::size_t>(work_->schedule->microbatches()) +
                  static_cast<std::size_t>(microbatch);
  return way == Way::Forward ? activations_[at] : gradients_[at];
}

Tag Executor::tag_of(Way way, int edge, int microbatch) const {
  return {.channel = static_cast<std::uint32_t>(edge) * 2 + (way == Way::Forward ? 0 : 1),
          .number = static_cast<std::uint32_t>(microbatch)};
}

// What a computation needs of other stages: activations along the edges that lead to its stage, or gradients along those
// that lead away.
std::vector<Message> Executor::collect(int stage, int microbatch, Way way) {
  const StageGraph& graph = work_->schedule->graph();
  std::vector<Message> messages;
  for (const int edge : way == Way::Forward ? graph.in_edges(stage) : graph.out_edges(stage)) {
    const Edge& ends = graph.edges()[static_cast<std::size_t>(edge)];
    const int from = rank_of(way == Way::Forward ? ends.from : ends.to);
    if (from == transport_->rank()) {
      messages.push_back(std::exchange(place_of(way, edge, microbatch), {}));
      continue;
    }
    const auto start = Clock::now();
    messages.push_back(transport_->receive(from, tag_of(way, edge, microbatch), deadline()));
    now_->waited += nanoseconds(Clock::now() - start);
    now_->peer = from - first_rank_;
  }
  now_->bytes += bytes_of(messages);
  return messages;
}

void Executor::put(int stage, int microbatch, Way way, std::vector<Message> messages) {
  const StageGraph& graph = work_->schedule->graph();
  std::size_t next = 0;
  for (const int edge : way == Way::Forward ? graph.out_edges(stage) : graph.in_edges(stage)) {
    place_of(way, edge, microbatch) = std::move(messages[next++]);
  }
}

void Executor::send(const Action& action) {
  const Edge ends = edge_under(action);
  const int edge = work_->schedule->graph().edge_index(ends.from, ends.to);
  const Way way = action.carries_activation() ? Way::Forward : Way::Backward;
  Message message = std::exchange(place_of(way, edge, action.microbatch), {});
  now_->bytes = bytes_of({message});
  now_->peer = work_->schedule->placement().rank_of(action.other_stage);
  try {
    transport_->send(rank_of(action.other_stage), tag_of(way, edge, action.microbatch), std::move(message), deadline());
  } catch (const UnsendableTensor& error) {
    throw StageError(name_of_value(ends, way, error.index()) + " is " + error.why());
  }
}

std::string Executor::name_of_value(const Edge& edge, Way way, std::size_t index) const {
  StageOutput value{.stage = edge.from, .output = static_cast<int>(index)};
  for (const Wiring::Link& link : work_->wiring->links_from(edge.from)) {
    if (link.to == edge.to && link.values) value = link.values->at(index);
  }
  const std::string name = "output " + std::to_string(value.output) + " of stage " + std::to_string(value.stage);
  return way == Way::Forward ? name : "the gradient of " + name;
}

void Executor::post_receive(const Action& action) {
  now_->peer = work_->schedule->placement().rank_of(action.other_stage);
  const Edge ends = edge_under(action);
  const Way way = action.carries_activation() ? Way::Forward : Way::Backward;
  transport_->post_receive(rank_of(action.other_stage),
                           tag_of(way, work_->schedule->graph().edge_index(ends.from, ends.to), action.microbatch));
}

StepWork& ActionContext::work() {
  return *executor_->work_;
}
PipelineStage& ActionContext::stage(int index) {
  return *executor_->stages_.at(index);
}
std::vector<Message> ActionContext::take_activations(int stage, int microbatch) {
  return executor_->collect(stage, microbatch, Executor::Way::Forward);
}
std::vector<Message> ActionContext::take_gradients(int stage, int microbatch) {
  return executor_->collect(stage, microbatch, Executor::Way::Backward);
}
void ActionContext::give_activations(int stage, int microbatch, std::vector<Message> messages) {
  executor_->put(stage, microbatch, Executor::Way::Forward, std::move(messages));
}
void ActionContext::give_gradients(int stage, int microbatch, std::vector<Message> messages) {
  executor_->put(stage, microbatch, Executor::Way::Backward, std::move(messages));
}
void ActionContext::run(const Action& action) {
  executor_->run_own(action);
}

}  // namespace penstock
