// The ranks of this process, with their stages and what connects them: all ranks of all replicas, which are threads, or
// one, and then the others are processes of their own.
//
// Ranks count through the replicas: those of the first one come first.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "penstock/runtime/executor.h"
#include "penstock/runtime/failure.h"
#include "penstock/runtime/rank_threads.h"
#include "penstock/runtime/record.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/saved_state.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/transport/exit_hook.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// A step, and what was written down of it: by replica of this process.
struct StepRun {
  const Schedule* schedule = nullptr;
  // What backwards may reach besides the stages' parameters: tensors of the batch.
  std::vector<c10::IValue> inputs;
  // What a rollback restores.
  SavedState saved;
  std::vector<StepWork> works;
  std::vector<Record> records;
};

struct RanksOptions {
  // This process's end, when it is one rank of several.
  std::shared_ptr<Transport> transport = nullptr;
  SharedParameters shared = {};
  bool sharded = false;
  // What all ranks have to agree on, in one number.
  std::uint64_t agreement = 0;
  // Whether this process has a loss function, or functions of the user's that may take its place.
  bool has_loss = false;
  const ActionFunctions* functions = nullptr;
  std::chrono::milliseconds timeout = {};
  int intra_op_threads = 1;
};

class Ranks {
 public:
  // The stages of each replica of this process: all, or those of its one rank. Throws PipelineError when they are not
  // those of the schedule, or the ranks do not agree.
  Ranks(std::vector<StagedModel> models, const Schedule& schedule, RanksOptions options);
  // Waits for actions of an abandoned step, and rolls it back.
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // Of a replica, and how many replicas there are, here and elsewhere.
  int ranks() const { return schedule_->ranks(); }
  int replicas() const;
  // The first of this process.
  int first_replica() const { return locals_.front().rank / ranks(); }
  const std::vector<StagedModel>& models() const { return models_; }
  // Whether a stage of this index is here.
  bool has_stage(int index) const;
  bool are_threads() const { return options_.transport == nullptr; }

  // A call of a step or an evaluation, from its first line to its last: abandon() ends it at any point of it. One thread at
  // a time makes a call.
  class Call {
   public:
    explicit Call(Ranks& ranks);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Ranks& ranks_;
  };

  // Runs a step on all of them, within a Call, and then `conclude`, with which the step succeeds or fails. Throws PipelineError, with what
  // every rank knows of it, or what `conclude` throws. Nothing of a step that failed is left, once all of its actions have
  // returned.
  void run(std::shared_ptr<StepRun> step, const std::function<void()>& conclude);
  // Ends a call of another thread with an error at once, also when an action does not return.
  void abandon();
  // Tells other processes, if there are any, that this one does not take part in the step that they have begun.
  void refuse(const std::string& why);

 private:
  struct Local {
    int rank = 0;
    std::map<int, PipelineStage*> stages;
    std::shared_ptr<Transport> transport;
    // The ranks that have the same stages in all replicas.
    std::shared_ptr<Group> peers;
    std::vector<StageSum> sums;
    Progress progress;
  };
  // A run and how its ranks fared.
  struct Running {
    std::shared_ptr<StepRun> step;
    Clock::time_point began;
    std::mutex mutex;
    // With what a rank of this process has thrown first, or that the caller has had enough.
    bool failed = false;
    std::string what;
    bool abandoned = false;
    // By rank of this process; without its place.
    std::vector<RankReport> failures;
  };

  void place_stages();
  void require_shared() const;
  void require_agreement();
  void connect();
  // Whether the transports are told what a rank is doing, when they ask.
  void report_on_abort(bool on);
  void join_sums(Local& local);
  static const at::Tensor& parameter_of(const PipelineStage& stage, const std::string& name);
  // Which one it is in its replica, and the first of that replica among all ranks.
  int own_rank(const Local& local) const { return local.rank % ranks(); }
  int first_rank(const Local& local) const { return local.rank - own_rank(local); }
  // Which one of this process's replicas it belongs to.
  std::size_t replica_here(const Local& local) const {
    return static_cast<std::size_t>(local.rank / ranks() - first_replica());
  }
  // nullptr for a rank of another process.
  const Local* find_local(int rank) const;
  // Which of a stage's parameters other stages have too.
  std::vector<bool> is_shared(const PipelineStage& stage) const;
  void require_shardable_stages() const;
  // Makes what keeps the stages' parameters in step with those of replicas. Stages are changed only when it succeeded on
  // all ranks.
  void share_parameters();
  void on_all(const std::function<void(Local&)>& act);

  // Ends the call of another thread, if there is one, with that reason.
  void cancel(const std::string& why);
  // Throws PipelineError when the call was cancelled before its step has started.
  void require_not_cancelled();
  // Ends the ranks' threads, when the process exits.
  void stop() noexcept;
  void run_rank(Running& running, std::size_t index);
  // Throws PipelineError for a step that had nothing to compute gradients of: no loss function and no loss terms.
  void require_roots(const StepWork& work) const;
  RankReport report_of(const Local& local, std::size_t index);
  [[noreturn]] void fail(const Running& running);
  // Begins the step on all stages, and saves what it may change. Throws PipelineError, with nothing changed.
  void begin(StepRun& step);
  void rollback(StepRun& step);
  // Rolls a failed step back, and connects the ranks anew. All of its actions have returned, and abandon_mutex_ is locked.
  void settle();
  void rollback_unsettled();

  const Schedule* schedule_;
  RanksOptions options_;
  std::vector<StagedModel> models_;
  std::deque<Local> locals_;
  std::vector<Executor> executors_;
  // Of processes: those of this one's replica.
  std::shared_ptr<Group> replica_group_;
  // Held while a run is abandoned, and while one ends.
  std::mutex abandon_mutex_;
  std::mutex running_mutex_;
  // State of the call that some thread is in.
  struct CallState {
    enum class Phase { Preparing, Running, Done } phase = Phase::Preparing;
    // Why it was cancelled.
    std::optional<std::string> cancelled;
  };
  std::optional<CallState> call_;
  std::shared_ptr<Running> running_;
  bool unsettled_ = false;
  // Whether some process has a loss function.
  bool has_loss_ = false;
  // Why there can be no further step.
  std::string broken_;
  RankThreads threads_;
  // Static objects that a first step makes are made.
  bool has_run_ = false;
  std::optional<ExitHook> at_exit_{std::in_place, [this] { stop(); }};
};

}  // namespace penstock::internal
