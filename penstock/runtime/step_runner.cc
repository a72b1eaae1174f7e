#include "penstock/runtime/step_runner.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/runtime/agreement.h"
#include "penstock/runtime/connections.h"
#include "penstock/runtime/error.h"
#include "penstock/runtime/loss_weight.h"
#include "penstock/runtime/message_order.h"
#include "penstock/runtime/parameter_setup.h"
#include "penstock/runtime/results.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {
namespace {

constexpr const char* kBroken =
    "this pipeline has failed in an earlier step.\n"
    "  Hint: with process ranks, construct a new transport and a new pipeline in each process to continue.";

// Time that actions have to return when the process exits.
constexpr Clock::duration kExitTime = std::chrono::seconds(5);

RankReport::Kind kind_of(TransportError::Why why) {
  switch (why) {
    case TransportError::Why::Timeout: return RankReport::Kind::Timeout;
    case TransportError::Why::PeerLost: return RankReport::Kind::PeerLost;
    case TransportError::Why::Aborted: break;
  }
  return RankReport::Kind::None;
}

}  // namespace

StepRunner::StepRunner(LocalRanks& ranks, const StepRunnerOptions& options)
    : ranks_(ranks),
      functions_(*options.functions),
      timeout_(options.timeout),
      has_loss_(options.has_loss),
      threads_(static_cast<int>(ranks.size()), options.intra_op_threads),
      at_exit_(std::in_place, [this] { stop(); }) {
  const bool has_replicas = ranks_.num_replicas() > 1;
  if (options.sharded && has_replicas) require_shardable(ranks_);
  if (!ranks_.are_threads()) {
    Agreement own{.digest = options.agreement, .has_loss = has_loss_, .stages = ranks_.schedule().stages()};
    for (const auto& [index, stage] : ranks_.ranks().front().stages) own.devices.emplace(index, stage->device());
    Agreed agreed = require_agreement(*ranks_.process_transport(), own, deadline_after(timeout_));
    has_loss_ = agreed.has_loss;
    devices_ = std::move(agreed.devices);
  }
  connect();
  // Later steps have the same connections.
  if (!ranks_.are_threads()) executors_.front().connect(ranks_.schedule());
  if (has_replicas) synchronise_parameters(ranks_, threads_, options.sharded, timeout_);
}

StepRunner::~StepRunner() {
  at_exit_.reset();
  if (!needs_rollback_) return;
  threads_.join();
  // Operators no longer work while the process exits.
  if (ExitHook::is_exiting()) {
    report_on_abort(false);
    return;
  }
  try {
    rollback_failed_step();
  } catch (const std::exception& error) {
    TORCH_WARN("a cancelled step could not be rolled back: ", reason_of(error));
  }
}

void StepRunner::connect() {
  executors_.clear();
  connect_ranks(ranks_);
  for (LocalRank& local : ranks_.ranks()) {
    executors_.emplace_back(*local.transport, ranks_.first_rank_of_replica(local), local.stages, local.sums, functions_,
                            devices_);
  }
}

void StepRunner::report_on_abort(bool enabled) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    LocalRank& local = ranks_.ranks()[i];
    if (enabled) {
      local.transport->on_abort([this, &local, i] { return encode_report(report_of(local, i)); });
    } else {
      local.transport->on_abort(nullptr);
    }
  }
}

RankReport StepRunner::report_of(const LocalRank& local, std::size_t index) {
  const MutexLock lock(call_mutex_);
  if (!running_) return {};
  RankReport report = running_->failures.failure(index);
  if (report.kind == RankReport::Kind::None) report.failure.clear();
  report.position = local.progress.position;
  report.waiting_for = local.transport->waiting_for();
  Clock::time_point since = running_->began + std::chrono::nanoseconds(local.progress.since);
  // A device that waits is at an earlier action than its host, which may wait too: for the end of the step, or for a
  // rank whose device is late.
  const Schedule& schedule = *running_->schedule;
  const int rank = ranks_.rank_in_replica(local);
  const bool host_waits =
      local.progress.waits_for_device || report.position >= static_cast<int>(schedule.actions(rank).size());
  const auto awaited = local.transport->awaited_by_device();
  if (awaited && report.kind != RankReport::Kind::Failed && (host_waits || awaited->since < since)) {
    report.position = position_of(schedule, rank, awaited->tag, awaited->is_receive);
    report.waiting_for = awaited->peer;
    since = awaited->since;
  }
  report.seconds_there = std::chrono::duration<double>(Clock::now() - since).count();
  return report;
}

StepRunner::Call::Call(StepRunner& runner) : runner_(runner) {
  const MutexLock lock(runner_.call_mutex_);
  runner_.call_.emplace();
  runner_.threads_.arm();
}

StepRunner::Call::~Call() {
  const MutexLock lock(runner_.call_mutex_);
  runner_.call_.reset();
}

void StepRunner::require_not_cancelled() {
  const MutexLock lock(call_mutex_);
  if (!call_->cancelled) return;
  // Other processes have been told by cancel().
  if (!ranks_.are_threads()) broken_ = kBroken;
  throw PipelineError(concat(*call_->cancelled, "."));
}

void StepRunner::cancel() {
  cancel("the caller has cancelled the step");
}

void StepRunner::cancel(const std::string& reason) {
  const MutexLock lock(end_mutex_);
  bool has_started = false;
  {
    const MutexLock call_lock(call_mutex_);
    if (!call_ || call_->phase == CallState::Phase::Done) return;
    if (!call_->cancelled) call_->cancelled = reason;
    has_started = call_->phase == CallState::Phase::Running;
    if (has_started) running_->failures.cancel(reason);
    // From here on, until the next call, no thread waits for the ranks.
    threads_.release();
  }
  // Ranks of other processes may have started although this one has not.
  if (!has_started && ranks_.are_threads()) return;
  for (LocalRank& local : ranks_.ranks()) local.transport->abort(reason);
}

void StepRunner::stop() noexcept {
  cancel("the process exits");
  threads_.stop(Clock::now() + kExitTime);
}

void StepRunner::refuse(const std::string& reason) {
  if (ranks_.are_threads()) return;
  broken_ = kBroken;
  Transport& transport = *ranks_.process_transport();
  transport.abort(concat("process ", transport.rank(), ": ", reason));
}

void StepRunner::begin_step(Step& step) {
  step.began = Clock::now();
  for (LocalRank& local : ranks_.ranks()) {
    local.progress.position = -1;
    local.progress.since = 0;
    local.progress.waits_for_device = false;
  }
  try {
    // The step comes after everything that the caller has started on the devices until now.
    const StreamPoint caller = StreamPoint::now(step.devices);
    for (ReplicaStep& replica : step.replicas) {
      replica.inputs.schedule = step.schedule;
      replica.inputs.began = step.began;
      replica.inputs.caller = caller;
    }
    in_streams_of_ranks([&](std::size_t i) {
      caller.block(ranks_.ranks()[i].streams.devices());
      executors_[i].begin_step(step.replicas[ranks_.local_replica(ranks_.ranks()[i])].inputs);
    });
    in_streams_of_ranks([&](std::size_t i) { executors_[i].begin_sums(step.replicas.front().inputs); });
    in_streams_of_ranks([&](std::size_t i) { executors_[i].save(step.saved); });
    for (const c10::IValue& value : std::exchange(step.batch_values, {})) step.saved.add_gradients_behind(value);
    const StreamPoint saved = StreamPoint::now(step.devices);
    in_streams_of_ranks([&](std::size_t i) { saved.block(ranks_.ranks()[i].streams.devices()); });
  } catch (const std::exception& error) {
    const std::string reason = reason_of(error);
    step.saved.clear();
    refuse_and_rollback(step, reason);
    throw PipelineError(reason);
  }
}

void StepRunner::in_streams_of_ranks(const std::function<void(std::size_t)>& act) {
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    const RankStreams::Scope streams(ranks_.ranks()[i].streams);
    act(i);
  }
}

void StepRunner::join_streams(const Step& step) {
  StreamPoint point = ranks_.point_after_all();
  // The thread of a rank has the default stream of devices that the rank does not compute on, and autograd joins
  // gradients of the batch there.
  for (const at::Device device : step.devices) {
    if (has_streams(device)) point.add(StreamPoint::after(default_stream(device)));
  }
  point.block(step.devices);
}

void StepRunner::start_ranks(const std::shared_ptr<Step>& step) {
  const MutexLock lock(call_mutex_);
  running_ = step;
  if (call_->cancelled) return;
  call_->phase = CallState::Phase::Running;
  threads_.start([this, step](int index) { run_rank(*step, static_cast<std::size_t>(index)); });
}

void StepRunner::run(std::shared_ptr<Step> step, const std::function<void()>& conclude) {
  if (needs_rollback_) {
    if (!threads_.wait()) require_not_cancelled();
    const MutexLock lock(end_mutex_);
    finish_rollback();
  }
  require_not_cancelled();
  if (!broken_.empty()) throw PipelineError(broken_);
  begin_step(*step);
  try {
    report_on_abort(true);
    start_ranks(step);
  } catch (const std::exception& error) {
    needs_rollback_ = true;
    refuse(reason_of(error));
    const MutexLock lock(end_mutex_);
    {
      const MutexLock call_lock(call_mutex_);
      running_ = step;
    }
    finish_rollback();
    throw;
  }
  threads_.wait();
  if (ExitHook::is_exiting()) {
    // Operators no longer work, so nothing is rolled back.
    needs_rollback_ = true;
    throw PipelineError("the process exits.");
  }

  const MutexLock lock(end_mutex_);
  bool has_started = false;
  {
    const MutexLock call_lock(call_mutex_);
    has_started = call_->phase == CallState::Phase::Running;
    call_->phase = CallState::Phase::Done;
  }
  if (!has_started) {
    finish_rollback();
    require_not_cancelled();
  }
  if (step->failures.has_failed()) fail(*step);
  conclude_step(*step, conclude);
}

void StepRunner::conclude_step(Step& step, const std::function<void()>& conclude) {
  report_on_abort(false);
  {
    const MutexLock call_lock(call_mutex_);
    running_.reset();
  }
  try {
    join_streams(step);
    for (const ReplicaStep& replica : step.replicas) require_gradients(replica);
    conclude();
    for (Executor& executor : executors_) executor.end_step();
  } catch (const std::exception& error) {
    refuse_and_rollback(step, reason_of(error));
    throw;
  }
  step.saved.clear();
  step.drop_values();
  if (!std::exchange(has_run_, true)) ExitHook::reregister();
}

void StepRunner::require_gradients(const ReplicaStep& replica) const {
  if (!replica.inputs.autograd || has_loss_) return;
  if (replica.outputs.has_terms_elsewhere || count_terms(replica.outputs) > 0) return;
  throw PipelineError(
      "the step has computed no gradients: there is no loss function, and no stage has added a loss term.\n"
      "  Hint: give PipelineOptions::loss, or call add_loss in a stage's forward; eval runs forwards alone.");
}

void StepRunner::run_rank(Step& step, std::size_t index) {
  LocalRank& local = ranks_.ranks()[index];
  ReplicaStep& replica = step.replicas[ranks_.local_replica(local)];
  RankReport failure{.kind = RankReport::Kind::Failed};
  // Made here, as there may be no memory for it once the rank has failed.
  const std::string abort_message = concat("rank ", local.rank, " has failed");
  try {
    const RankStreams::Scope streams(local.streams);
    if (!replica.inputs.weights.weights.empty() && !ranks_.are_threads()) {
      share_weights(replica.inputs.weights, local.replica_group.get(), local.counterparts.get(), ranks_.num_replicas(),
                    deadline_after(timeout_));
    }
    const auto rank = static_cast<std::size_t>(ranks_.rank_in_replica(local));
    executors_[index].run(replica.inputs, replica.outputs, replica.record[rank], replica.device_times[rank],
                          local.progress);
    if (replica.inputs.autograd && !has_loss_ && local.replica_group) {
      share_terms(replica.outputs, *local.replica_group, deadline_after(timeout_));
    }
    if (replica.inputs.options->results_everywhere && local.replica_group) {
      share_results(replica.outputs, *local.replica_group, deadline_after(timeout_));
    }
    return;
  } catch (const TransportError& error) {
    failure.failure = text_without_memory([&] { return reason_of(error); });
    failure.kind = kind_of(error.why());
  } catch (const std::exception& error) {
    failure.failure = text_without_memory([&] { return reason_of(error); });
  } catch (...) {
    failure.failure = text_without_memory([] { return std::string("an exception that is no std::exception"); });
  }
  step.failures.add(index, std::move(failure));
  local.transport->abort(abort_message);
}

void StepRunner::fail(const Step& step) {
  FailedStep failed{.schedule = step.schedule,
                    .reason = step.failures.reason(),
                    .reports = {},
                    .timeout_seconds = std::chrono::duration<double>(timeout_).count()};
  for (const auto& text : ranks_.ranks().front().transport->reports(Clock::now() + Transport::kReportTime)) {
    failed.reports.push_back(text ? std::optional(decode_report(*text)) : std::nullopt);
  }
  if (!ranks_.are_threads()) broken_ = kBroken;
  needs_rollback_ = true;
  // Actions of a cancelled step may still run; the next step waits for them.
  if (!step.failures.is_cancelled() || threads_.are_idle()) {
    // The caller holds end_mutex_.
    try_rollback([this] { finish_rollback(); });
  }
  throw explain(failed);
}

void StepRunner::refuse_and_rollback(Step& step, const std::string& reason) {
  refuse(reason);
  try_rollback([&] { rollback_step(step); });
}

void StepRunner::try_rollback(const std::function<void()>& rollback) {
  try {
    rollback();
  } catch (const std::exception& error) {
    // A device that has failed accepts no more work. The reason of the step's failure says more than this.
    broken_ = concat("this pipeline could not be rolled back after a failed step: ", reason_of(error));
  }
}

void StepRunner::rollback_step(Step& step) {
  std::exception_ptr error;
  try {
    join_streams(step);
    step.saved.restore();
  } catch (...) {
    error = std::current_exception();
  }
  for (Executor& executor : executors_) executor.rollback_step();
  step.drop_values();
  if (error) std::rethrow_exception(error);
}

bool StepRunner::is_idle() {
  return threads_.are_idle();
}

void StepRunner::finish_rollback() {
  rollback_failed_step();
  if (!ranks_.are_threads()) return;
  try {
    connect();
  } catch (const std::exception& error) {
    broken_ = concat("the ranks could not be connected again after a failed step: ", reason_of(error));
    throw;
  }
}

void StepRunner::rollback_failed_step() {
  needs_rollback_ = false;
  report_on_abort(false);
  std::shared_ptr<Step> failed;
  {
    const MutexLock lock(call_mutex_);
    failed = std::exchange(running_, nullptr);
  }
  rollback_step(*failed);
}

}  // namespace penstock::internal
