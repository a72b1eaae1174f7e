#include "penstock/runtime/executor.h"

#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <deque>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/device_span.h"
#include "penstock/stage/parameter_sync.h"
#include "penstock/tensor/random_scope.h"

namespace penstock::internal {
namespace {

// Sparse and nested tensors have no number of bytes, and are not counted.
std::int64_t bytes_of(std::span<const Message> messages) {
  std::int64_t bytes = 0;
  for (const Message& message : messages) {
    for (const at::Tensor& tensor : message) {
      if (tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested()) {
        bytes += static_cast<std::int64_t>(tensor.nbytes());
      }
    }
  }
  return bytes;
}

std::int64_t nanoseconds(Clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// Number of computations that the host may be ahead of the device. With many more, the memory of messages would grow
// with the number of microbatches: a tensor that two streams use is not reused before the device has come so far.
constexpr std::size_t kMostAhead = 16;

Direction direction_of(const Action& message) {
  return message.carries_activation() ? Direction::Forward : Direction::Backward;
}

}  // namespace

void Executor::begin_step(const StepInputs& inputs) {
  using Mode = PipelineStage::Mode;
  const Mode mode = inputs.autograd ? Mode::Autograd : inputs.backward ? Mode::UserBackward : Mode::Evaluation;
  for (const auto& [index, stage] : stages_) stage->begin(*inputs.wiring, inputs.schedule->microbatches(), mode);
}

void Executor::begin_sums(const StepInputs& inputs) {
  if (!inputs.backward) return;
  for (StageSum& sum : *sums_) sum.sum.begin_step();
}

void Executor::save(SavedState& saved) const {
  const bool has_overrides = !functions_->overrides.empty();
  for (const auto& [index, stage] : stages_) stage->save(saved, has_overrides);
}

void Executor::end_step() {
  for (const auto& [index, stage] : stages_) stage->end();
  for (StageSum& sum : *sums_) sum.sum.end_step();
}

void Executor::rollback_step() {
  computed_.clear();
  for (StageSum& sum : *sums_) sum.sum.rollback();
  for (const auto& [index, stage] : stages_) stage->rollback();
}

void Executor::connect(const Schedule& schedule) {
  if (!transport_->needs_order()) return;
  auto& order = orders_[&schedule];
  if (order == nullptr) {
    order = std::make_shared<MessageOrder>(message_order(schedule, first_rank_, transport_->rank(), *devices_));
  }
  transport_->set_order(order);
}

void Executor::run(const StepInputs& inputs, StepOutputs& outputs, std::vector<ActionRecord>& record,
                   DeviceTimes& times, Progress& progress) {
  inputs_ = &inputs;
  outputs_ = &outputs;
  connect(*inputs.schedule);
  transport_->begin_step(inputs.signature);
  const Schedule& schedule = *inputs.schedule;
  const auto slots = schedule.graph().edges().size() * static_cast<std::size_t>(schedule.microbatches());
  for (std::vector<Message>* messages : {&activations_, &gradients_}) {
    messages->clear();
    messages->resize(slots);
  }
  device_inputs_.begin_step(inputs);
  losses_.begin_step(inputs, outputs, device_inputs_);

  const std::span<const Action> actions = schedule.actions(rank());
  recomputed_ = recomputed_microbatches(schedule, rank());
  record.assign(actions.size(), {});
  times_ = RankStreams::devices_of_thread().empty() ? nullptr : &times;
  times.begin_step(times_ == nullptr ? 0 : actions.size());
  posted_.clear();
  const c10::AutoGradMode grad_mode(inputs.autograd);
  std::int64_t now = nanoseconds(Clock::now() - inputs.began);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    progress.since.store(now, std::memory_order_relaxed);
    progress.position.store(static_cast<int>(i), std::memory_order_release);
    current_ = &record[i];
    current_->start = now;
    current_index_ = i;
    const std::optional<at::Device> device = timed_device(actions[i]);
    if (device) times.begin(i, *device);
    if (functions_->before) functions_->before(rank(), actions[i]);
    {
      at::RecordFunction guard(at::RecordScope::USER_SCOPE);
      if (guard.isActive()) guard.before("PP:" + to_string(actions[i]));
      run_action(actions[i]);
    }
    if (device) {
      times.end(i, *device);
      if (actions[i].is_compute()) wait_for_device(times.end_of(i), actions[i], progress);
    }
    if (functions_->after) functions_->after(rank(), actions[i]);
    now = nanoseconds(Clock::now() - inputs.began);
    current_->end = now;
  }
  const auto end = static_cast<int>(actions.size());
  progress.since.store(now, std::memory_order_relaxed);
  progress.position.store(end, std::memory_order_release);
  finish_reductions();
  device_inputs_.end_step(deadline());
  transport_->end_step(deadline());
  progress.position.store(end + 1, std::memory_order_release);
}

void Executor::wait_for_device(const TimedEvent& end, const Action& action, Progress& progress) {
  computed_.emplace_back(end, action);
  if (computed_.size() <= kMostAhead) return;
  const auto [oldest, late] = std::move(computed_.front());
  computed_.pop_front();
  // A device may wait for a message, whose own deadline comes first and names the rank that is late.
  progress.waits_for_device = true;
  const bool is_reached = wait_for(*oldest, deadline_after(2 * bounded(inputs_->timeout)));
  progress.waits_for_device = false;
  if (is_reached) return;
  throw TransportError(TransportError::Why::Timeout, transport_->rank(),
                       concat("the device has not finished ", to_string(late), " within the deadline"));
}

std::optional<at::Device> Executor::timed_device(const Action& action) const {
  if (times_ == nullptr) return std::nullopt;
  std::optional<at::Device> device;
  const auto take = [&](const Action& part) {
    const at::Device found = stages_.at(part.stage)->device();
    if (!device && has_streams(found)) device = found;
  };
  if (action.is_overlap()) {
    for_each_part(action, take);
  } else {
    take(action);
  }
  return device;
}

void Executor::run_action(const Action& action) {
  if (action.is_compute() && !action.is_overlap()) {
    if (ParameterSync* const sync = stages_.at(action.stage)->sync()) sync->finish_unshard(deadline());
  }
  const auto found = functions_->overrides.find(action.computation);
  if (found == functions_->overrides.end()) return run_default(action);
  ActionContext context(*this);
  found->second(action, context);
}

void Executor::run_default(const Action& action) {
  switch (action.computation) {
    case Computation::Forward: forward(action); break;
    case Computation::InputBackward:
    case Computation::FullBackward: backward(action); break;
    case Computation::Recompute: stages_.at(action.stage)->recompute(action.microbatch); break;
    case Computation::WeightBackward: stages_.at(action.stage)->weight_backward(action.microbatch); break;
    case Computation::Overlap: for_each_part(action, [this](const Action& part) { run_action(part); }); break;
    case Computation::SendForward:
    case Computation::SendBackward: send(action); break;
    case Computation::RecvForward:
    case Computation::RecvBackward: post_receive(action); break;
    case Computation::Unshard:
    case Computation::Reshard:
    case Computation::ReduceGrad:
    case Computation::SumShared: sync_parameters(action); break;
  }
}

void Executor::sync_parameters(const Action& action) {
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
      for (StageSum& sum : *sums_) {
        if (sum.group == inputs_->schedule->graph().group_of(action.stage)) sum.sum.reduce(deadline());
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
  const Batch& batch = inputs_->microbatches[static_cast<std::size_t>(action.microbatch)];
  PipelineStage& stage = *stages_.at(action.stage);
  std::vector<Message> received = collect(action.stage, action.microbatch, Direction::Forward);
  const auto found = batch.kwargs.find(action.stage);
  const Args& given_args = stage.is_first() ? batch.args : kNoArgs;
  const Kwargs& given_kwargs = found == batch.kwargs.end() ? kNoKwargs : found->second;
  const std::optional<Args> moved_args = device_inputs_.moved(given_args, stage.device(), deadline());
  const std::optional<Kwargs> moved_kwargs = device_inputs_.moved(given_kwargs, stage.device(), deadline());
  const Args& args = moved_args ? *moved_args : given_args;
  const Kwargs& kwargs = moved_kwargs ? *moved_kwargs : given_kwargs;
  PipelineStage::Forwarded result;
  {
    const RandomScope scope(inputs_->seed, *inputs_->options->number, action.microbatch, action.stage);
    result = stage.forward(action.microbatch, std::move(received), args, kwargs,
                           recomputed_.contains({action.stage, action.microbatch}));
  }
  if (stage.is_last()) losses_.add_output(stage, action.microbatch, result.output, args, kwargs);
  losses_.add_terms(stage, action.microbatch, result.losses, args, kwargs);
  put(action.stage, action.microbatch, Direction::Forward, std::move(result.sent));
}

void Executor::backward(const Action& action) {
  PipelineStage& stage = *stages_.at(action.stage);
  std::vector<Message> gradients = collect(action.stage, action.microbatch, Direction::Backward);
  put(action.stage, action.microbatch, Direction::Backward,
      action.computation == Computation::FullBackward ? stage.full_backward(action.microbatch, std::move(gradients))
                                                      : stage.input_backward(action.microbatch, std::move(gradients)));
}

Message& Executor::slot(Direction direction, int edge, int microbatch) {
  const std::size_t index = slot_index(edge, microbatch);
  return direction == Direction::Forward ? activations_[index] : gradients_[index];
}

std::size_t Executor::slot_index(int edge, int microbatch) const {
  return static_cast<std::size_t>(edge) * static_cast<std::size_t>(inputs_->schedule->microbatches()) +
         static_cast<std::size_t>(microbatch);
}

std::vector<Message> Executor::collect(int stage, int microbatch, Direction direction) {
  const StageGraph& graph = inputs_->schedule->graph();
  std::vector<Message> messages;
  const at::Device device = stages_.at(stage)->device();
  DeviceSpan wait;
  if (times_ != nullptr && has_streams(device)) wait = DeviceSpan::begin(current_stream(device));
  for (const int edge : direction == Direction::Forward ? graph.in_edges(stage) : graph.out_edges(stage)) {
    const Edge& ends = graph.edges()[static_cast<std::size_t>(edge)];
    const int from = rank_of(direction == Direction::Forward ? ends.from : ends.to);
    if (from == transport_->rank()) {
      messages.push_back(std::exchange(slot(direction, edge, microbatch), {}));
      hand_over(messages.back(), device);
      continue;
    }
    const auto start = Clock::now();
    TransferLog transfers;
    messages.push_back(transport_->receive(from, tag_of(direction, edge, microbatch), deadline()));
    current_->waited += nanoseconds(Clock::now() - start);
    current_->peer = from - first_rank_;
    if (times_ != nullptr) {
      const auto posted = posted_.find(slot_index(edge, microbatch) * 2 + (direction == Direction::Forward ? 0 : 1));
      if (posted != posted_.end()) {
        times_->set_transfers(posted->second, transfers.take(), bytes_of(std::span(&messages.back(), 1)));
      }
    }
  }
  current_->bytes += bytes_of(messages);
  if (!wait.empty()) {
    wait.end(current_stream(device));
    times_->add_wait(current_index_, std::move(wait));
  }
  return messages;
}

void Executor::hand_over(Message& message, at::Device device) {
  if (times_ == nullptr) return;
  const StreamPoint computed = StreamPoint::now(devices_of(message));
  if (!move_to_device(message, device, computed, copy_streams_, deadline())) {
    throw TransportError(TransportError::Why::Timeout, transport_->rank(),
                         "the device has not computed a message within the deadline");
  }
}

void Executor::put(int stage, int microbatch, Direction direction, std::vector<Message> messages) {
  const StageGraph& graph = inputs_->schedule->graph();
  std::size_t next = 0;
  for (const int edge : direction == Direction::Forward ? graph.out_edges(stage) : graph.in_edges(stage)) {
    slot(direction, edge, microbatch) = std::move(messages[next++]);
  }
}

void Executor::send(const Action& action) {
  const Edge ends = edge_under(action);
  const int edge = inputs_->schedule->graph().edge_index(ends.from, ends.to);
  const Direction direction = direction_of(action);
  Message message = std::exchange(slot(direction, edge, action.microbatch), {});
  current_->bytes = bytes_of(std::span(&message, 1));
  current_->peer = inputs_->schedule->placement().rank_of(action.other_stage);
  TransferLog transfers;
  try {
    transport_->send(rank_of(action.other_stage), tag_of(direction, edge, action.microbatch), std::move(message),
                     deadline());
  } catch (const UnsendableTensor& error) {
    throw StageError(concat(name_of_value(ends, direction, error.index()), " is ", error.why()));
  }
  if (times_ != nullptr) times_->set_transfers(current_index_, transfers.take(), current_->bytes);
}

std::string Executor::name_of_value(const Edge& edge, Direction direction, std::size_t index) const {
  StageOutput value{.stage = edge.from, .output = static_cast<int>(index)};
  for (const Wiring::Link& link : inputs_->wiring->links_from(edge.from)) {
    if (link.to == edge.to && link.values) value = link.values->at(index);
  }
  return concat(direction == Direction::Forward ? "" : "the gradient of ", "output ", value.output, " of stage ",
                value.stage);
}

void Executor::post_receive(const Action& action) {
  current_->peer = inputs_->schedule->placement().rank_of(action.other_stage);
  const Edge ends = edge_under(action);
  const int edge = inputs_->schedule->graph().edge_index(ends.from, ends.to);
  const Direction direction = direction_of(action);
  transport_->post_receive(rank_of(action.other_stage), tag_of(direction, edge, action.microbatch),
                           stages_.at(action.stage)->device());
  if (times_ != nullptr) {
    posted_[slot_index(edge, action.microbatch) * 2 + (direction == Direction::Forward ? 0 : 1)] = current_index_;
  }
}

}  // namespace penstock::internal
