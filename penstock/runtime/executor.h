// The executor: one loop that walks a rank's lowered actions, whatever the schedule, the placement or the graph of
// stages.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/runtime/batch.h"
#include "penstock/runtime/record.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/saved_state.h"
#include "penstock/stage/shared_sum.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"
#include "penstock/transport/transport.h"

namespace penstock {

// One step, as all ranks see it. What comes out is written by the rank that has it, each place by one rank only.
struct StepWork {
  const Schedule* schedule = nullptr;
  const Wiring* wiring = nullptr;
  bool backward = false;
  // Whether the backwards are those of autograd.
  bool autograd = false;
  std::vector<Batch> microbatches;
  bool has_target = false;
  // The factor of each microbatch's loss in the gradients.
  std::vector<double> weights;
  // How much each microbatch's loss counts; empty without a LossWeight. Between processes only the rank that has the
  // target knows them at first: see share_weights.
  std::vector<double> loss_weights;
  // The weight that gradients are divided by; left out: the sum of all loss_weights.
  std::optional<double> total_weight;
  // Whether gradients are divided by it.
  bool scale_grads = true;
  // Whether the caller has given `weights`, which then stay as they are.
  bool seeds_are_given = false;
  LossFunction loss;
  Kwargs loss_kwargs;
  bool keep_outputs = false;
  const std::optional<c10::IValue>* output_merge_spec = nullptr;
  // Whether all processes of the replica get what comes out.
  bool results_everywhere = false;
  // Of the sizes that this rank brings into the step: see Transport::begin_step.
  std::uint64_t signature = 0;
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::chrono::milliseconds timeout = {};
  Clock::time_point began = {};

  // Whether outputs were kept here.
  bool has_outputs = false;
  std::vector<c10::IValue> outputs;
  std::vector<at::Tensor> losses;
  // By microbatch and stage.
  std::vector<std::map<int, std::vector<at::Tensor>>> loss_terms;
  // Whether another process of the replica has loss terms; asked for only when no process has a loss function.
  bool has_terms_elsewhere = false;
};

class Executor;

// What a function of the user's that takes the place of a computation has to work with: all that ours has.
class ActionContext {
 public:
  explicit ActionContext(Executor& executor) : executor_(&executor) {}

  StepWork& work();
  PipelineStage& stage(int index);
  // What came for a stage along the edges that lead to it, and gradients along those that lead away; each is taken once.
  std::vector<Message> take_activations(int stage, int microbatch);
  std::vector<Message> take_gradients(int stage, int microbatch);
  // What a stage gives along the edges that lead away from it, and gradients along those that lead to it.
  void give_activations(int stage, int microbatch, std::vector<Message> messages);
  void give_gradients(int stage, int microbatch, std::vector<Message> messages);
  // Does what would be done without the user's function: for a pair, its parts in turn, by the functions for these.
  void run(const Action& action);

 private:
  Executor* executor_;
};

using ActionFunction = std::function<void(const Action& action, ActionContext& context)>;

// What the user has to say about actions.
struct ActionFunctions {
  // In place of ours, by what is computed.
  std::map<Computation, ActionFunction> instead;
  // Around each action of a rank, on its thread.
  std::function<void(int rank, const Action& action)> before;
  std::function<void(int rank, const Action& action)> after;
};

// Where a rank is, for others to see.
struct Progress {
  // The index of the action that it has begun last; -1 before the first, their number while it waits at the end for
  // others, and one more after that.
  std::atomic<int> position = -1;
  // When it began, in nanoseconds of the step.
  std::atomic<std::int64_t> since = 0;
};

// What a rank has of a parameter that stages share, and their group in the graph.
struct StageSum {
  int group = 0;
  SharedSum sum;
};

class Executor {
 public:
  // The stages of one rank, by index, and what it has of parameters that stages share. The ranks of this pipeline are
  // those of the transport from `first_rank` on: it may have other replicas too.
  Executor(Transport& transport, int first_rank, std::map<int, PipelineStage*> stages, std::vector<StageSum>& sums,
           const ActionFunctions& functions)
      : transport_(&transport),
        first_rank_(first_rank),
        stages_(std::move(stages)),
        sums_(&sums),
        functions_(&functions) {}

  // Before a step: begin for all ranks, then begin_sums for all ranks, then save. After it: end, or rollback when what was
  // saved is restored. By one thread, as several ranks may have one and the same parameter. The first two throw StageError.
  void begin(const StepWork& work);
  void begin_sums(const StepWork& work);
  void save(SavedState& saved) const;
  void end();
  void rollback();

  // Runs this rank's part of a step, and writes down what ran. Throws whatever an action throws; `progress` then says
  // which.
  void run(StepWork& work, std::vector<ActionRecord>& record, Progress& progress);

 private:
  friend class ActionContext;

  // Which way a message goes along an edge.
  enum class Way { Forward, Backward };

  // By the user's function, if there is one, or by ours.
  void run_action(const Action& action);
  void run_own(const Action& action);
  void forward(const Action& action);
  void compute_loss(int microbatch, const c10::IValue& output);
  // Keeps the output of a microbatch, and throws StageError when those that there are cannot be merged: before the last
  // backward, so that the step fails on all ranks.
  void keep_output(std::size_t microbatch, c10::IValue output);
  void add_nothing(int microbatch, const c10::IValue& output);
  // What is left of a loss when its microbatch is done. The losses of a step lie in memory that is set aside at the
  // first: small tensors that stay between large ones that go leave holes, and none of these fits the next large one.
  at::Tensor kept_loss(const at::Tensor& loss, std::size_t microbatch);
  // The gradient of a loss: its weight. Most often it is that of the loss before.
  const at::Tensor& seed_of(const at::Tensor& loss, int microbatch);
  void backward(const Action& action);
  void send(const Action& action);
  void post_receive(const Action& action);
  // Names a tensor of the message that goes along an edge: "output 1 of stage 2".
  std::string name_of_value(const Edge& edge, Way way, std::size_t index) const;
  void change_parameters(const Action& action);
  void finish_reductions();

  int rank() const { return transport_->rank() - first_rank_; }
  int rank_of(int stage) const { return first_rank_ + work_->schedule->placement().rank_of(stage); }

  std::vector<Message> collect(int stage, int microbatch, Way way);
  void put(int stage, int microbatch, Way way, std::vector<Message> messages);
  Message& place_of(Way way, int edge, int microbatch);
  Tag tag_of(Way way, int edge, int microbatch) const;
  Deadline deadline() const { return deadline_after(work_->timeout); }

  Transport* transport_;
  int first_rank_;
  std::map<int, PipelineStage*> stages_;
  std::vector<StageSum>* sums_;
  const ActionFunctions* functions_;

  // Of the step that runs.
  StepWork* work_ = nullptr;
  ActionRecord* now_ = nullptr;
  at::Tensor seed_;
  double seed_weight_ = 0;
  // By microbatch.
  std::vector<at::Tensor> loss_places_;
  std::size_t outputs_kept_ = 0;
  // What waits for a stage of this rank, or to be sent: by edge and microbatch.
  std::vector<Message> activations_;
  std::vector<Message> gradients_;
};

}  // namespace penstock
