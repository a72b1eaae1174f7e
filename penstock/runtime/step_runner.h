// Runs steps on the ranks of this process: starts them on their threads, collects failures, ends a step that was
// cancelled, and rolls back one that failed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/base/mutex.h"
#include "penstock/runtime/actions.h"
#include "penstock/runtime/executor.h"
#include "penstock/runtime/failure.h"
#include "penstock/runtime/local_ranks.h"
#include "penstock/runtime/rank_threads.h"
#include "penstock/runtime/step_state.h"
#include "penstock/transport/exit_hook.h"

namespace penstock::internal {

struct StepRunnerOptions {
  bool sharded = false;
  // Digest of what all processes have to agree on: see require_agreement.
  std::uint64_t agreement = 0;
  // True if this process has a loss function, or overrides that may compute one.
  bool has_loss = false;
  // Outlives the runner.
  const ActionFunctions* functions = nullptr;
  std::chrono::milliseconds timeout = {};
  int intra_op_threads = 1;
};

// State of the call that a thread is in.
struct CallState {
  enum class Phase { Preparing, Running, Done } phase = Phase::Preparing;
  // Reason of the cancellation, if there was one.
  std::optional<std::string> cancelled;
};

// One thread at a time runs steps; any other thread may cancel the step in flight. When the process exits, a step in
// flight is cancelled and the threads end.
class StepRunner {
 public:
  // Starts the threads, connects the ranks and synchronises the parameters of replicas. `ranks` outlives the runner.
  // Throws PipelineError if processes disagree, StageError if parameters cannot be sharded, and TransportError.
  StepRunner(LocalRanks& ranks, const StepRunnerOptions& options);
  // Waits for the actions of a cancelled step, and rolls it back.
  ~StepRunner();
  StepRunner(const StepRunner&) = delete;
  StepRunner& operator=(const StepRunner&) = delete;

  // Scope of one call of step() or eval(), in which cancel() has an effect: it covers splitting the batch and merging
  // outputs too.
  class Call {
   public:
    explicit Call(StepRunner& runner);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    StepRunner& runner_;
  };

  // Runs a step on all local ranks, within a Call. `conclude` reads the results; the step fails if it throws. Throws
  // PipelineError with the reports of all ranks, or what `conclude` throws. A failed step is rolled back when its last
  // action has returned: before this throws, or, after cancel(), before the next step.
  void run(std::shared_ptr<Step> step, const std::function<void()>& conclude);
  // Fails the call that another thread is in, at once, even if an action does not return. Without a call it does
  // nothing.
  void cancel();
  // Returns false while an action of a cancelled step still runs.
  bool is_idle();
  // Tells other processes that this one cannot take part in the step that they have begun.
  void refuse(const std::string& reason);

 private:
  void connect();
  // Registers functions with the transports that report where a rank is when the step is aborted.
  void report_on_abort(bool enabled);
  RankReport report_of(const LocalRank& local, std::size_t index) PENSTOCK_EXCLUDES(call_mutex_);

  void cancel(const std::string& reason) PENSTOCK_EXCLUDES(end_mutex_, call_mutex_);
  // Throws PipelineError if the call was cancelled before its actions have started.
  void require_not_cancelled() PENSTOCK_EXCLUDES(call_mutex_);
  // Called when the process exits.
  void stop() noexcept;

  // Saves what the step may change, on all ranks. Throws PipelineError, with nothing changed.
  void begin_step(Step& step);
  // Calls act(index) for each local rank on the calling thread, in the streams of the rank.
  void in_streams_of_ranks(const std::function<void(std::size_t)>& act);
  // Makes later work in the calling thread's streams wait for what the step has started.
  void join_streams(const Step& step);
  // Starts the ranks' actions unless the call has been cancelled.
  void start_ranks(const std::shared_ptr<Step>& step) PENSTOCK_EXCLUDES(call_mutex_);
  void run_rank(Step& step, std::size_t index);
  // Ends a step whose ranks have all returned without an error.
  void conclude_step(Step& step, const std::function<void()>& conclude) PENSTOCK_REQUIRES(end_mutex_);
  // Throws PipelineError if the step has computed no gradients: without a loss function and loss terms.
  void require_gradients(const ReplicaStep& replica) const;
  [[noreturn]] void fail(const Step& step) PENSTOCK_REQUIRES(end_mutex_);

  // Restores everything that the step has changed, and frees its values.
  void rollback_step(Step& step);
  // Does so after an error outside of the ranks' actions, of which other processes are told.
  void refuse_and_rollback(Step& step, const std::string& reason);
  // Calls the function, and takes an error of it for the end of this pipeline.
  void try_rollback(const std::function<void()>& rollback);
  // Rolls back the failed step, of which all actions have returned, and connects thread ranks anew.
  void finish_rollback() PENSTOCK_EXCLUDES(call_mutex_);
  void rollback_failed_step() PENSTOCK_EXCLUDES(call_mutex_);

  LocalRanks& ranks_;
  const ActionFunctions& functions_;
  std::chrono::milliseconds timeout_;
  // True if some process has a loss function.
  bool has_loss_;
  // Devices of the stages of all process ranks.
  StageDeviceTable devices_;
  // One for each local rank.
  std::vector<Executor> executors_;

  // Serialises cancel() with the end of run(). Acquired before call_mutex_.
  Mutex end_mutex_ PENSTOCK_ACQUIRED_BEFORE(call_mutex_);
  // Protects the state of the call and the pointer to the step in flight. Acquired before the mutex of a FailureLog and
  // the monitor of RankThreads.
  Mutex call_mutex_;
  std::optional<CallState> call_ PENSTOCK_GUARDED_BY(call_mutex_);
  std::shared_ptr<Step> running_ PENSTOCK_GUARDED_BY(call_mutex_);

  // The rest is used by the thread that runs steps, and by the destructor.
  //
  // True while a failed step waits for its last action to be rolled back.
  bool needs_rollback_ = false;
  // Reason why no further step can run; empty if there is none.
  std::string broken_;
  // True after the first step, which makes static objects of libtorch.
  bool has_run_ = false;
  RankThreads threads_;
  // The last member: its function uses all others.
  std::optional<ExitHook> at_exit_;
};

}  // namespace penstock::internal
