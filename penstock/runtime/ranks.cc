#include "penstock/runtime/ranks.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <numeric>
#include <set>
#include <utility>

#include "penstock/runtime/error.h"
#include "penstock/runtime/loss_weight.h"
#include "penstock/runtime/results.h"
#include "penstock/stage/parameter_sync.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/threads.h"

namespace penstock::internal {
namespace {

constexpr const char* kBroken =
    "this pipeline has failed in an earlier step.\n"
    "  Hint: between processes, each makes a new transport and a new pipeline to go on.";

// When the process exits, actions have this long to return.
constexpr Clock::duration kExitTime = std::chrono::seconds(5);

std::string list_text(const std::vector<int>& numbers) {
  if (numbers.empty()) return "none";
  std::string text;
  for (const int number : numbers) text.append(text.empty() ? "" : ", ").append(std::to_string(number));
  return text;
}

// Returns what `text` returns. When there is not even memory for that, it is less, and short enough to need none.
template <class Text>
std::string text_or_less(const Text& text) noexcept {
  try {
    return text();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  }
}

std::vector<int> count_from(int first, int count) {
  std::vector<int> numbers(static_cast<std::size_t>(count));
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

}  // namespace

Ranks::Ranks(std::vector<StagedModel> models, const Schedule& schedule, RanksOptions options)
    : schedule_(&schedule),
      options_(std::move(options)),
      models_(std::move(models)),
      threads_(are_threads() ? schedule.ranks() * static_cast<int>(models_.size()) : 1, options_.intra_op_threads) {
  has_loss_ = options_.has_loss;
  place_stages();
  require_shared();
  if (options_.sharded && replicas() > 1) require_shardable_stages();
  if (!are_threads()) require_agreement();
  connect();
  if (replicas() > 1) share_parameters();
}

Ranks::~Ranks() {
  at_exit_.reset();
  if (!unsettled_) return;
  threads_.join();
  // Operators do not work any more while the process exits.
  if (ExitHook::is_exiting()) {
    report_on_abort(false);
    return;
  }
  try {
    rollback_unsettled();
  } catch (const std::exception& error) {
    TORCH_WARN("a step that was abandoned could not be rolled back: ", reason_of(error));
  }
}

int Ranks::replicas() const {
  return are_threads() ? static_cast<int>(models_.size()) : options_.transport->ranks() / ranks();
}

bool Ranks::has_stage(int index) const {
  return std::any_of(locals_.begin(), locals_.end(), [&](const Local& local) { return local.stages.contains(index); });
}

void Ranks::place_stages() {
  if (!are_threads() && options_.transport->ranks() % ranks() != 0) {
    throw PipelineError("there are " + std::to_string(options_.transport->ranks()) +
                        " processes, and the schedule is for " + std::to_string(ranks()) +
                        " ranks: the first number should be a multiple of the second.");
  }
  const int first = are_threads() ? 0 : options_.transport->rank();
  const int count = are_threads() ? ranks() * static_cast<int>(models_.size()) : 1;
  for (int rank = first; rank < first + count; ++rank) {
    Local& local = locals_.emplace_back();
    local.rank = rank;
    for (PipelineStage& stage : models_[static_cast<std::size_t>((rank - first) / ranks())].stages()) {
      const bool own = schedule_->placement().rank_of(stage.stage_index()) == rank % ranks();
      if (own) local.stages[stage.stage_index()] = &stage;
    }
  }
  if (are_threads()) return;
  std::vector<int> given;
  for (const PipelineStage& stage : models_.front().stages()) given.push_back(stage.stage_index());
  const auto expected = schedule_->placement().stages_of(first % ranks());
  if (given == std::vector<int>(expected.begin(), expected.end())) return;
  throw PipelineError("this process was given stages " + list_text(given) + ", and the schedule puts stages " +
                      list_text({expected.begin(), expected.end()}) + " on it.");
}

// Those of this process are there.
void Ranks::require_shared() const {
  for (const std::vector<SharedParameter>& places : options_.shared) {
    for (const SharedParameter& place : places) {
      for (const Local& local : locals_) {
        const auto found = local.stages.find(place.stage);
        if (found != local.stages.end()) parameter_of(*found->second, place.name);
      }
    }
  }
}

void Ranks::require_agreement() {
  Transport& transport = *options_.transport;
  const Deadline deadline = deadline_after(options_.timeout);
  transport.begin_step(options_.agreement);
  const auto from = [&](int rank, Tag tag) {
    transport.post_receive(rank, tag);
    return transport.receive(rank, tag, deadline).at(0);
  };
  // The numbers of all processes, by way of the first.
  const auto gathered = [&](std::int64_t number, std::uint32_t round) {
    const Tag tag{.channel = 0, .number = round};
    at::Tensor all = at::full({transport.ranks()}, number, at::kLong);
    if (transport.rank() == 0) {
      for (int rank = 1; rank < transport.ranks(); ++rank) all[rank] = from(rank, tag)[rank];
      for (int rank = 1; rank < transport.ranks(); ++rank) transport.send(rank, tag, {all}, deadline);
      return all;
    }
    transport.send(0, tag, {all}, deadline);
    return from(0, tag);
  };
  const at::Tensor all = gathered(static_cast<std::int64_t>(options_.agreement), /*round=*/0);
  int other = 1;
  while (other < transport.ranks() && all[other].item<std::int64_t>() == all[0].item<std::int64_t>()) ++other;
  const bool agree = other == transport.ranks();
  // Nobody leaves before all know, or who is slow would hear of another's end first.
  try {
    has_loss_ = gathered(options_.has_loss ? 1 : 0, /*round=*/1).any().item<bool>();
    transport.end_step(deadline);
  } catch (const TransportError&) {
    if (agree) throw;
  }
  if (agree) return;
  throw PipelineError("process " + std::to_string(other) +
                      " has another pipeline than process 0: the schedule, the wiring, the parameters that are "
                      "shared, whether they are sharded and whether there is a loss_weight should be the same in all "
                      "processes.\n"
                      "  Hint: pass the same wiring and shared parameters to StagedModel in all processes.");
}

// New ends for ranks that are threads, with nothing under way.
void Ranks::connect() {
  executors_.clear();
  std::vector<std::unique_ptr<Transport>> ends;
  if (are_threads()) ends = thread_transports(static_cast<int>(locals_.size()));
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    local.transport = are_threads() ? std::move(ends[i]) : options_.transport;
    if (replicas() > 1) {
      std::vector<int> peers;
      for (int replica = 0; replica < replicas(); ++replica) peers.push_back(replica * ranks() + own_rank(local));
      local.peers = local.transport->group(peers);
    }
    for (const auto& [index, stage] : local.stages) {
      if (stage->sync() != nullptr) stage->sync()->join(local.peers);
    }
    if (!are_threads() && ranks() > 1) {
      replica_group_ = local.transport->group(count_from(first_rank(local), ranks()));
    }
    join_sums(local);
    executors_.emplace_back(*local.transport, first_rank(local), local.stages, local.sums, *options_.functions);
  }
}

const at::Tensor& Ranks::parameter_of(const PipelineStage& stage, const std::string& name) {
  for (const auto& [own, parameter] : stage.module().parameters) {
    if (own == name) return parameter;
  }
  throw PipelineError("stage " + std::to_string(stage.stage_index()) + " has no parameter '" + name + "' to share.");
}

// What a rank has of the parameters that stages share, with groups to sum their gradients in.
void Ranks::join_sums(Local& local) {
  const int first = first_rank(local);
  std::size_t next = 0;
  for (const std::vector<SharedParameter>& places : options_.shared) {
    // Gradients of one tensor in several stages are already summed in its .grad; the first rank that has it represents
    // it.
    std::set<const void*> seen;
    std::set<int> owners;
    std::set<int> representatives;
    NamedTensors own;
    for (const SharedParameter& place : places) {
      const int rank = first + schedule_->placement().rank_of(place.stage);
      const Local* there = find_local(rank);
      owners.insert(rank);
      if (there != nullptr) {
        const at::Tensor& parameter = parameter_of(*there->stages.at(place.stage), place.name);
        if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
        if (there == &local) {
          own.emplace_back("stage " + std::to_string(place.stage) + ", parameter '" + place.name + "'", parameter);
        }
      }
      representatives.insert(rank);
    }
    const bool alone = representatives.size() == 1 && seen.size() <= 1 && replicas() == 1;
    if (!owners.contains(local.rank) || alone) continue;
    SharedSum::Groups groups;
    if (owners != representatives) groups.owners = local.transport->group({owners.begin(), owners.end()});
    if (!own.empty()) {
      std::vector<int> all;
      for (int replica = 0; replica < replicas(); ++replica) {
        for (const int representative : representatives) all.push_back(replica * ranks() + representative - first);
      }
      groups.representatives = local.transport->group(all);
    }
    const int group = schedule_->graph().group_of(places.front().stage);
    if (next == local.sums.size()) local.sums.push_back({group, SharedSum(own, {}, replicas())});
    local.sums[next++].sum.join(std::move(groups));
  }
}

const Ranks::Local* Ranks::find_local(int rank) const {
  const auto found =
      std::find_if(locals_.begin(), locals_.end(), [rank](const Local& local) { return local.rank == rank; });
  return found == locals_.end() ? nullptr : &*found;
}

std::vector<bool> Ranks::is_shared(const PipelineStage& stage) const {
  std::vector<bool> result;
  for (const auto& [name, parameter] : stage.module().parameters) {
    const SharedParameter own{stage.stage_index(), name};
    result.push_back(std::any_of(options_.shared.begin(), options_.shared.end(), [&](const auto& places) {
      return std::find(places.begin(), places.end(), own) != places.end();
    }));
  }
  return result;
}

void Ranks::require_shardable_stages() const {
  std::vector<StageToShard> all;
  for (const Local& local : locals_) {
    for (const auto& [index, stage] : local.stages) all.push_back({&stage->module(), is_shared(*stage), index});
  }
  require_shardable(all);
}

void Ranks::share_parameters() {
  std::vector<std::map<int, std::unique_ptr<ParameterSync>>> made(locals_.size());
  on_all([&](Local& local) {
    const Deadline deadline = deadline_after(options_.timeout);
    auto& own = made[static_cast<std::size_t>(local.rank - locals_.front().rank)];
    for (const auto& [index, stage] : local.stages) {
      own[index] = options_.sharded
                       ? shard_parameters(stage->module(), is_shared(*stage), index, local.peers, deadline)
                       : replicate_parameters(stage->module(), is_shared(*stage), index, local.peers, deadline);
    }
  });
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    for (const auto& [index, stage] : locals_[i].stages) {
      made[i][index]->adopt();
      stage->set_sync(std::move(made[i][index]));
    }
  }
}

// Outside of a step. Throws what the first of them throws.
void Ranks::on_all(const std::function<void(Local&)>& act) {
  std::mutex mutex;
  std::exception_ptr first;
  threads_.run([&](int index) {
    Local& local = locals_[static_cast<std::size_t>(index)];
    try {
      act(local);
    } catch (const std::exception& error) {
      local.transport->abort("rank " + std::to_string(local.rank) + ": " + reason_of(error));
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  });
  if (first) std::rethrow_exception(first);
}

void Ranks::report_on_abort(bool on) {
  for (std::size_t i = 0; i < locals_.size(); ++i) {
    Local& local = locals_[i];
    if (on) {
      local.transport->on_abort([this, &local, i] { return encode_report(report_of(local, i)); });
    } else {
      local.transport->on_abort(nullptr);
    }
  }
}

void Ranks::begin(StepRun& step) {
  try {
    for (std::size_t i = 0; i < executors_.size(); ++i) executors_[i].begin(step.works[replica_here(locals_[i])]);
    for (Executor& executor : executors_) executor.begin_sums(step.works.front());
    for (const Executor& executor : executors_) executor.save(step.saved);
    for (const c10::IValue& input : std::exchange(step.inputs, {})) step.saved.add_gradients_behind(input);
  } catch (const std::exception& error) {
    step.saved.clear();
    rollback(step);
    refuse(reason_of(error));
    throw PipelineError(reason_of(error));
  }
}

void Ranks::rollback(StepRun& step) {
  step.saved.restore();
  for (Executor& executor : executors_) executor.rollback();
}

Ranks::Call::Call(Ranks& ranks) : ranks_(ranks) {
  const std::lock_guard lock(ranks_.running_mutex_);
  ranks_.call_.emplace();
  ranks_.threads_.arm();
}

Ranks::Call::~Call() {
  const std::lock_guard lock(ranks_.running_mutex_);
  ranks_.call_.reset();
}

void Ranks::require_not_cancelled() {
  const std::lock_guard lock(running_mutex_);
  if (!call_->cancelled) return;
  // Other processes were told.
  if (!are_threads()) broken_ = kBroken;
  throw PipelineError(*call_->cancelled + ".");
}

void Ranks::run(std::shared_ptr<StepRun> step, const std::function<void()>& conclude) {
  if (unsettled_) {
    if (!threads_.wait()) require_not_cancelled();
    const std::lock_guard lock(abandon_mutex_);
    settle();
  }
  require_not_cancelled();
  if (!broken_.empty()) throw PipelineError(broken_);
  const auto running = std::make_shared<Running>();
  running->step = std::move(step);
  running->failures.resize(locals_.size());
  running->began = Clock::now();
  for (StepWork& work : running->step->works) {
    work.schedule = running->step->schedule;
    work.began = running->began;
  }
  for (Local& local : locals_) {
    local.progress.position = -1;
    local.progress.since = 0;
  }
  begin(*running->step);
  report_on_abort(true);
  {
    const std::lock_guard lock(running_mutex_);
    running_ = running;
    if (!call_->cancelled) {
      call_->phase = CallState::Phase::Running;
      threads_.start([this, running](int index) { run_rank(*running, static_cast<std::size_t>(index)); });
    }
  }
  threads_.wait();
  if (ExitHook::is_exiting()) {
    // Operators do not work any more, so that nothing is rolled back.
    unsettled_ = true;
    throw PipelineError("the process exits.");
  }

  const std::lock_guard lock(abandon_mutex_);
  bool cancelled_before = false;
  {
    const std::lock_guard running_lock(running_mutex_);
    cancelled_before = call_->phase == CallState::Phase::Preparing;
    call_->phase = CallState::Phase::Done;
  }
  if (cancelled_before) {
    settle();
    require_not_cancelled();
  }
  bool failed = false;
  {
    const std::lock_guard failures_lock(running->mutex);
    failed = running->failed;
  }
  if (failed) fail(*running);
  report_on_abort(false);
  {
    const std::lock_guard running_lock(running_mutex_);
    running_.reset();
  }
  try {
    for (const StepWork& work : running->step->works) require_roots(work);
    conclude();
    for (Executor& executor : executors_) executor.end();
  } catch (const std::exception& error) {
    rollback(*running->step);
    running->step->works.clear();
    refuse(reason_of(error));
    throw;
  }
  running->step->saved.clear();
  if (!std::exchange(has_run_, true)) ExitHook::reregister();
}

void Ranks::require_roots(const StepWork& work) const {
  if (!work.autograd || has_loss_ || work.has_terms_elsewhere || count_terms(work) > 0) return;
  throw PipelineError(
      "the step has computed no gradients: there is no loss function, and no stage has added a loss term.\n"
      "  Hint: give PipelineOptions::loss, or call add_loss in a stage's forward; eval runs forwards alone.");
}

void Ranks::run_rank(Running& running, std::size_t index) {
  Local& local = locals_[index];
  const std::size_t replica = replica_here(local);
  StepWork& work = running.step->works[replica];
  RankReport failure{.kind = RankReport::Kind::Failed};
  // Made beforehand, as there may be no memory for it once a rank has failed.
  const std::string abort_message = "rank " + std::to_string(local.rank) + " has failed";
  try {
    if (!work.loss_weights.empty() && !are_threads()) {
      share_weights(work, replica_group_.get(), local.peers.get(), replicas(), deadline_after(options_.timeout));
    }
    executors_[index].run(work, running.step->records[replica][static_cast<std::size_t>(own_rank(local))],
                          local.progress);
    if (work.autograd && !has_loss_ && replica_group_) {
      share_terms(work, *replica_group_, deadline_after(options_.timeout));
    }
    if (work.results_everywhere && replica_group_) {
      share_results(work, *replica_group_, deadline_after(options_.timeout));
    }
    return;
  } catch (const TransportError& error) {
    failure.failure = text_or_less([&] { return reason_of(error); });
    switch (error.why()) {
      case TransportError::Why::Timeout: failure.kind = RankReport::Kind::WasLate; break;
      case TransportError::Why::PeerLost: failure.kind = RankReport::Kind::IsGone; break;
      case TransportError::Why::Aborted: failure.kind = RankReport::Kind::None; break;
    }
  } catch (const std::exception& error) {
    failure.failure = text_or_less([&] { return reason_of(error); });
  } catch (...) {
    failure.failure = text_or_less([] { return std::string("an exception that is no std::exception"); });
  }
  {
    const std::lock_guard lock(running.mutex);
    if (!std::exchange(running.failed, true)) running.what = text_or_less([&] { return failure.failure; });
    running.failures[index] = std::move(failure);
  }
  local.transport->abort(abort_message);
}

RankReport Ranks::report_of(const Local& local, std::size_t index) {
  RankReport report;
  const std::lock_guard lock(running_mutex_);
  if (!running_) return report;
  {
    const std::lock_guard failures_lock(running_->mutex);
    report = running_->failures[index];
  }
  if (report.kind == RankReport::Kind::None) report.failure.clear();
  report.position = local.progress.position;
  report.waiting_for = local.transport->waiting_for();
  const auto there = Clock::now() - running_->began - std::chrono::nanoseconds(local.progress.since);
  report.seconds_there = std::chrono::duration<double>(there).count();
  return report;
}

void Ranks::abandon() {
  cancel("the caller has abandoned the step");
}

void Ranks::cancel(const std::string& why) {
  const std::lock_guard lock(abandon_mutex_);
  bool started = false;
  {
    const std::lock_guard running_lock(running_mutex_);
    if (!call_ || call_->phase == CallState::Phase::Done) return;
    if (!call_->cancelled) call_->cancelled = why;
    started = call_->phase == CallState::Phase::Running;
    if (started) {
      const std::lock_guard failures_lock(running_->mutex);
      running_->abandoned = true;
      if (!std::exchange(running_->failed, true)) running_->what = why;
    }
    // From here on, until the next call, nothing waits for the ranks.
    threads_.release();
  }
  // Ranks of other processes may have started.
  if (!started && are_threads()) return;
  for (Local& local : locals_) local.transport->abort(why);
}

void Ranks::stop() noexcept {
  cancel("the process exits");
  threads_.stop(Clock::now() + kExitTime);
}

void Ranks::refuse(const std::string& why) {
  if (are_threads()) return;
  broken_ = kBroken;
  options_.transport->abort("process " + std::to_string(options_.transport->rank()) + ": " + why);
}

// With abandon_mutex_ locked.
void Ranks::fail(const Running& running) {
  FailedStep failed{.schedule = running.step->schedule,
                    .what = running.what,
                    .reports = {},
                    .timeout_seconds = std::chrono::duration<double>(options_.timeout).count()};
  for (const auto& text : locals_.front().transport->reports(Clock::now() + Transport::kReportTime)) {
    failed.reports.push_back(text ? std::optional(decode_report(*text)) : std::nullopt);
  }
  if (!are_threads()) broken_ = kBroken;
  unsettled_ = true;
  if (!running.abandoned || threads_.are_idle()) settle();
  throw explain(failed);
}

void Ranks::settle() {
  rollback_unsettled();
  if (are_threads()) connect();
}

void Ranks::rollback_unsettled() {
  unsettled_ = false;
  report_on_abort(false);
  std::shared_ptr<Running> failed;
  {
    const std::lock_guard lock(running_mutex_);
    failed = std::exchange(running_, nullptr);
  }
  rollback(*failed->step);
  failed->step->works.clear();
}

}  // namespace penstock::internal
