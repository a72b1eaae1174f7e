#include "penstock/runtime/pipeline.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "penstock/runtime/executor.h"
#include "penstock/runtime/rank_threads.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"
#include "penstock/transport/threads.h"

namespace penstock {
namespace {

// A stage graph of the links of a wiring, and the groups that share parameters.
StageGraph graph_of(const Wiring& wiring, const StageGraph& given) {
  StageGraph graph(wiring.stages());
  for (const Wiring::Link& link : wiring.links()) graph.add_edge(link.from, link.to);
  for (const std::vector<int>& group : given.groups()) graph.share(group);
  return graph;
}

Schedule lowered(const Schedule& schedule, const Wiring& wiring) {
  Schedule wired = schedule.with_graph(graph_of(wiring, schedule.graph()));
  if (!features_of(wired).communication && wired.ranks() > 1) return lower(wired);
  require_valid(wired);
  return features_of(wired).computations_only() ? lower(wired) : wired;
}

// The first thing that went wrong, as its rank saw it.
struct Failure {
  int rank = 0;
  int position = 0;
  bool aborted = false;
  TransportError::Why why = TransportError::Why::Aborted;
  int peer = TransportError::kNobody;
  std::string what;
};

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

}  // namespace

struct Pipeline::State {
  State(std::vector<PipelineStage> given_stages, const Wiring& given_wiring, const Schedule& schedule,
        PipelineOptions given_options)
      : stages(std::move(given_stages)),
        wiring(given_wiring),
        options(std::move(given_options)),
        training(lowered(schedule, wiring)),
        evaluation(drop_backwards(training)),
        without_reductions(drop_reductions(training)),
        threads(training.ranks(), options.intra_op_threads) {
    require_stages();
    connect();
  }

  void require_stages() const {
    if (static_cast<int>(stages.size()) != training.stages()) {
      throw PipelineError("there are " + std::to_string(stages.size()) + " stages, and the schedule is for " +
                          std::to_string(training.stages()) + ".");
    }
    for (std::size_t i = 0; i < stages.size(); ++i) {
      if (stages[i].stage_index() == static_cast<int>(i) && stages[i].num_stages() == training.stages()) continue;
      throw PipelineError("stage " + std::to_string(i) + " of the list says that it is stage " +
                          std::to_string(stages[i].stage_index()) + " of " + std::to_string(stages[i].num_stages()) +
                          "; they should be in order.");
    }
  }

  // New ends for all ranks, with nothing under way.
  void connect() {
    executors.clear();
    transports = thread_transports(training.ranks());
    for (int rank = 0; rank < training.ranks(); ++rank) {
      std::map<int, PipelineStage*> own;
      for (const int stage : training.placement().stages_of(rank))
        own[stage] = &stages[static_cast<std::size_t>(stage)];
      executors.emplace_back(*transports[static_cast<std::size_t>(rank)], std::move(own), functions);
    }
  }

  StepWork prepare(const Args& args, const Kwargs& kwargs, const c10::IValue& target, const StepOptions& step_options,
                   bool backward);
  StepResult run(StepWork work, const Schedule& schedule);
  [[noreturn]] void fail(const StepWork& work, const std::vector<Failure>& failures,
                         const std::vector<Progress>& progress);

  std::vector<PipelineStage> stages;
  Wiring wiring;
  PipelineOptions options;
  ActionFunctions functions;
  Schedule training;
  Schedule evaluation;
  Schedule without_reductions;
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<Executor> executors;
  Record record;
  const Schedule* recorded = &training;
  std::int64_t steps = 0;
  RankThreads threads;
};

StepWork Pipeline::State::prepare(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                                  const StepOptions& step_options, bool backward) {
  const int count = training.microbatches();
  const auto require_count = [&](std::size_t found, const std::string& what) {
    if (static_cast<int>(found) == count) return;
    throw PipelineError(what + " can be split into " + std::to_string(found) +
                        " microbatches only, and the schedule has " + std::to_string(count) +
                        ".\n  Hint: give at least " + std::to_string(count) +
                        " rows, or make the schedule for fewer microbatches.");
  };
  StepWork work;
  SplitArgs split = split_args_kwargs_into_chunks(args, kwargs, count, options.args_spec, options.kwargs_spec);
  require_count(split.args.size(), "the arguments");
  work.args = std::move(split.args);
  work.kwargs[0] = std::move(split.kwargs);
  for (const auto& [stage, own] : step_options.stage_kwargs) {
    if (stage < 1 || stage >= training.stages()) {
      throw PipelineError("there are keyword arguments for stage " + std::to_string(stage) +
                          "; those of later stages are for 1 to " + std::to_string(training.stages() - 1) + ".");
    }
    const auto spec = options.stage_kwargs_specs.find(stage);
    work.kwargs[stage] = split_args_kwargs_into_chunks(
                             {}, own, count, std::nullopt,
                             spec == options.stage_kwargs_specs.end() ? std::nullopt : std::optional(spec->second))
                             .kwargs;
    require_count(work.kwargs[stage].size(), "the keyword arguments of stage " + std::to_string(stage));
  }
  if (!target.isNone()) {
    std::optional<c10::IValue> spec;
    if (options.target_spec) spec = c10::ivalue::Tuple::create({*options.target_spec});
    for (Args& one : split_args_kwargs_into_chunks({target}, {}, count, spec).args) work.targets.push_back(one[0]);
    require_count(work.targets.size(), "the target");
  } else if (options.loss && backward) {
    // A loss that needs no target.
    work.targets.resize(static_cast<std::size_t>(count));
  }
  work.weights = step_options.weights;
  if (work.weights.empty()) {
    work.weights.assign(static_cast<std::size_t>(count), options.scale_grads ? 1.0 / count : 1.0);
  }
  require_count(work.weights.size(), "the weights");
  work.wiring = &wiring;
  work.backward = backward;
  work.loss = options.loss;
  work.loss_kwargs = step_options.loss_kwargs;
  work.keep_outputs = step_options.return_outputs;
  work.seed = options.seed;
  work.step = steps++;
  work.timeout = options.timeout;
  work.outputs.resize(static_cast<std::size_t>(count));
  work.losses.resize(static_cast<std::size_t>(count));
  work.loss_terms.resize(static_cast<std::size_t>(count));
  return work;
}

StepResult Pipeline::State::run(StepWork work, const Schedule& schedule) {
  work.schedule = &schedule;
  recorded = &schedule;
  record.resize(static_cast<std::size_t>(schedule.ranks()));
  std::vector<Progress> progress(static_cast<std::size_t>(schedule.ranks()));
  std::mutex mutex;
  std::vector<Failure> failures;
  work.began = Clock::now();
  threads.run([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    Failure failure;
    failure.rank = rank;
    try {
      executors[at].run(work, record[at], progress[at]);
      return;
    } catch (const TransportError& error) {
      failure.aborted = error.why() == TransportError::Why::Aborted;
      failure.why = error.why();
      failure.peer = error.peer();
      failure.what = error.what();
    } catch (const c10::Error& error) {
      failure.what = error.what_without_backtrace();
    } catch (const std::exception& error) {
      failure.what = error.what();
    } catch (...) {
      failure.what = "an exception that is no std::exception";
    }
    failure.position = progress[at].position.load();
    transports[at]->abort("rank " + std::to_string(rank) + " has failed");
    const std::lock_guard lock(mutex);
    failures.push_back(std::move(failure));
  });
  if (!failures.empty()) fail(work, failures, progress);

  StepResult result;
  if (work.keep_outputs) result.output = merge_chunks(work.outputs, options.output_merge_spec);
  if (work.loss && !work.targets.empty()) result.losses = std::move(work.losses);
  for (auto& by_stage : work.loss_terms) {
    std::vector<at::Tensor>& terms = result.loss_terms.emplace_back();
    for (auto& [stage, own] : by_stage) terms.insert(terms.end(), own.begin(), own.end());
  }
  return result;
}

void Pipeline::State::fail(const StepWork& work, const std::vector<Failure>& failures,
                           const std::vector<Progress>& progress) {
  const Schedule& schedule = *work.schedule;
  // Those that were told of another's failure only follow it.
  const auto found = std::find_if(failures.begin(), failures.end(), [](const Failure& one) { return !one.aborted; });
  const Failure& first = found == failures.end() ? failures.front() : *found;
  const auto actions = schedule.actions(first.rank);
  std::string message = "rank " + std::to_string(first.rank);
  if (first.position >= 0 && first.position < static_cast<int>(actions.size())) {
    const Action& action = actions[static_cast<std::size_t>(first.position)];
    message += ", stage " + std::to_string(action.stage) + ", " + to_string(action);
    if (action.microbatch != kNone) message += " (microbatch " + std::to_string(action.microbatch) + ")";
  }
  message += ": " + first.what;
  if (first.why == TransportError::Why::Late && !first.aborted && first.peer != TransportError::kNobody) {
    message += " of " + seconds_text(std::chrono::duration<double>(work.timeout).count()) + ".";
  }
  const auto now = Clock::now() - work.began;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    if (rank == first.rank) continue;
    const auto at = static_cast<std::size_t>(rank);
    const int position = progress[at].position.load();
    const auto list = schedule.actions(rank);
    message += "\n  rank " + std::to_string(rank) + ": ";
    if (position < 0) {
      message += "had not begun";
    } else if (position >= static_cast<int>(list.size())) {
      message += "had ended";
    } else {
      const double since =
          std::chrono::duration<double>(now - std::chrono::nanoseconds(progress[at].since.load())).count();
      message += "was in " + to_string(list[static_cast<std::size_t>(position)]) + " for " + seconds_text(since);
    }
  }
  message +=
      "\n" + table_of(schedule,
                      {.mark_rank = first.rank, .mark_position = first.position, .steps_around = 3, .most_ranks = 8});
  // What was under way is forgotten; the next step finds ends of its own.
  connect();
  throw PipelineError(message);
}

Pipeline::Pipeline(std::vector<PipelineStage> stages, const Schedule& schedule, PipelineOptions options)
    : Pipeline(std::move(stages), Wiring(schedule.stages()), schedule, std::move(options)) {}

Pipeline::Pipeline(std::vector<PipelineStage> stages, const Wiring& wiring, const Schedule& schedule,
                   PipelineOptions options)
    : state_(std::make_unique<State>(std::move(stages), wiring, schedule, std::move(options))) {}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

StepResult Pipeline::step(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                          const StepOptions& options) {
  if (!c10::GradMode::is_enabled()) {
    throw PipelineError("step computes gradients, which are switched off on this thread.\n  Hint: eval needs none.");
  }
  if (!features_of(state_->training).backward) {
    throw PipelineError("this schedule has no backwards.\n  Hint: eval runs forwards alone.");
  }
  return state_->run(state_->prepare(args, kwargs, target, options, /*backward=*/true),
                     options.reduce ? state_->training : state_->without_reductions);
}

StepResult Pipeline::eval(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                          const StepOptions& options) {
  return state_->run(state_->prepare(args, kwargs, target, options, /*backward=*/false), state_->evaluation);
}

const Schedule& Pipeline::schedule() const {
  return state_->training;
}
const std::vector<PipelineStage>& Pipeline::stages() const {
  return state_->stages;
}
const Record& Pipeline::record() const {
  return state_->record;
}
const Schedule& Pipeline::recorded_schedule() const {
  return *state_->recorded;
}

}  // namespace penstock
