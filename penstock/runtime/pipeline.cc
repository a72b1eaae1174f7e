#include "penstock/runtime/pipeline.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/runtime/agreement.h"
#include "penstock/runtime/local_ranks.h"
#include "penstock/runtime/model_checks.h"
#include "penstock/runtime/results.h"
#include "penstock/runtime/stage_graph.h"
#include "penstock/runtime/step_builder.h"
#include "penstock/runtime/step_runner.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"
#include "penstock/transport/exit_hook.h"

namespace penstock {
namespace {

using internal::concat;
using internal::ExitHook;
using internal::LocalRanks;
using internal::Step;
using internal::StepBuilder;
using internal::StepRunner;

// Time that a thread in a step is held while another thread exits the process.
constexpr std::chrono::seconds kHeldAtExit{10};

// Returns the schedule with the edges and groups of the model, lowered unless it has messages already.
Schedule lowered(const Schedule& schedule, const StageGraph& graph) {
  Schedule wired = schedule.with_graph(graph);
  const Features features = features_of(wired);
  const auto crosses_ranks = [&](const Edge& edge) {
    return wired.placement().rank_of(edge.from) != wired.placement().rank_of(edge.to);
  };
  // Lists that have reductions already may still lack their messages.
  const bool lacks_messages = !features.communication && std::ranges::any_of(wired.graph().edges(), crosses_ranks);
  if (features.computations_only() || lacks_messages) return lower(wired);
  require_valid(wired);
  return wired;
}

// Returns the schedule to run. Checks the models first, as the schedule's graph is taken from the first of them.
Schedule schedule_for(const std::vector<StagedModel>& replicas, const Schedule& schedule, bool are_threads) {
  internal::require_models(replicas, schedule, are_threads);
  const StagedModel& model = replicas.front();
  return lowered(schedule, internal::graph_of(model.wiring(), model.shared_parameters()));
}

std::vector<StagedModel> single(StagedModel model) {
  std::vector<StagedModel> replicas;
  replicas.push_back(std::move(model));
  return replicas;
}

}  // namespace

struct Pipeline::State {
  State(std::vector<StagedModel> replicas, const Schedule& schedule, PipelineOptions given_options)
      : options(std::move(given_options)),
        training(schedule_for(replicas, schedule, options.transport == nullptr)),
        evaluation(drop_backwards(training)),
        without_reductions(drop_reductions(training)),
        ranks(std::move(replicas), training, options.transport),
        builder(options, ranks),
        runner(ranks, {.sharded = options.sharded,
                       .agreement = internal::agreement_digest(training, ranks.models().front(), options),
                       .has_loss = options.loss != nullptr || !options.functions.overrides.empty(),
                       .functions = &options.functions,
                       .timeout = options.timeout,
                       .intra_op_threads = options.intra_op_threads}) {}

  StepResult run(const std::function<std::shared_ptr<Step>()>& build, const Schedule& schedule);
  // Runs the step; if the process exits meanwhile on another thread, holds the calling thread. An error would be of no
  // use then: an exception that nobody catches would abort the process, and operators of the caller would fail. If the
  // exiting thread waits for this one, the error is thrown in the end.
  StepResult run_unless_exiting(const std::function<std::shared_ptr<Step>()>& build, const Schedule& schedule);

  PipelineOptions options;
  Schedule training;
  Schedule evaluation;
  Schedule without_reductions;
  // The last step that began, for its records.
  std::shared_ptr<Step> last = std::make_shared<Step>(0);
  // Number of steps and evaluations that succeeded.
  std::int64_t steps = 0;
  LocalRanks ranks;
  StepBuilder builder;
  StepRunner runner;
};

StepResult Pipeline::State::run(const std::function<std::shared_ptr<Step>()>& build, const Schedule& schedule) {
  const StepRunner::Call call(runner);
  std::shared_ptr<Step> step;
  try {
    step = build();
  } catch (const std::exception& error) {
    // Other processes have begun the step, and wait for this one.
    runner.refuse(error.what());
    throw;
  }
  step->schedule = &schedule;
  last = step;
  StepResult result;
  runner.run(step, [&] { result = internal::take_results(step->replicas, options.output_merge_spec); });
  // A failed step is not counted: the next one with the same batch draws the same random numbers.
  ++steps;
  return result;
}

StepResult Pipeline::State::run_unless_exiting(const std::function<std::shared_ptr<Step>()>& build,
                                               const Schedule& schedule) {
  try {
    if (ExitHook::is_exiting()) throw PipelineError("the process exits.");
    return run(build, schedule);
  } catch (...) {
    if (ExitHook::is_exiting() && !ExitHook::is_exiting_thread()) std::this_thread::sleep_for(kHeldAtExit);
    throw;
  }
}

Pipeline::Pipeline(StagedModel model, const Schedule& schedule, PipelineOptions options)
    : Pipeline(single(std::move(model)), schedule, std::move(options)) {}

Pipeline::Pipeline(std::vector<StagedModel> replicas, const Schedule& schedule, PipelineOptions options) {
  const std::shared_ptr<Transport> transport = options.transport;
  try {
    state_ = std::make_unique<State>(std::move(replicas), schedule, std::move(options));
  } catch (const std::exception& error) {
    // Other processes wait for this one.
    if (transport) transport->abort(concat("process ", transport->rank(), ": ", error.what()));
    throw;
  }
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

StepResult Pipeline::step(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                          const StepOptions& options) {
  return state_->run_unless_exiting(
      [&] {
        if (state_->options.backward_requires_autograd && !c10::GradMode::is_enabled()) {
          throw PipelineError(
              "step computes gradients, which are disabled on this thread.\n  Hint: call eval, which needs none.");
        }
        if (!features_of(state_->training).backward) {
          throw PipelineError("this schedule has no backwards.\n  Hint: eval runs forwards alone.");
        }
        return state_->builder.build(args, kwargs, target, options, /*backward=*/true, state_->steps);
      },
      options.reduce ? state_->training : state_->without_reductions);
}

StepResult Pipeline::eval(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                          const StepOptions& options) {
  return state_->run_unless_exiting(
      [&] { return state_->builder.build(args, kwargs, target, options, /*backward=*/false, state_->steps); },
      state_->evaluation);
}

void Pipeline::cancel() {
  state_->runner.cancel();
}

const Schedule& Pipeline::schedule() const {
  return state_->training;
}
int Pipeline::replicas() const {
  return static_cast<int>(state_->ranks.models().size());
}
const std::vector<PipelineStage>& Pipeline::stages(int replica) const {
  return state_->ranks.models().at(static_cast<std::size_t>(replica)).stages();
}
const Record& Pipeline::record(int replica) const {
  // A cancelled step may still run.
  if (state_->runner.is_idle()) state_->last->resolve_times(deadline_after(state_->options.timeout));
  return state_->last->replicas.at(static_cast<std::size_t>(replica)).record;
}
const Schedule& Pipeline::recorded_schedule() const {
  return state_->last->schedule == nullptr ? state_->training : *state_->last->schedule;
}

}  // namespace penstock
