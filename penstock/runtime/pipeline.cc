#include "penstock/runtime/pipeline.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <thread>
#include <utility>

#include "penstock/runtime/digest.h"
#include "penstock/runtime/loss_weight.h"
#include "penstock/runtime/ranks.h"
#include "penstock/runtime/results.h"
#include "penstock/runtime/stage_graph.h"
#include "penstock/schedule/csv.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"
#include "penstock/tensor/nested.h"
#include "penstock/transport/exit_hook.h"

namespace penstock {
namespace {

using Stages = std::vector<PipelineStage>;

// A thread in a step is held this long while another thread exits the process.
constexpr std::chrono::seconds kHeldAtExit{10};

Schedule lowered(const Schedule& schedule, const StageGraph& graph) {
  Schedule wired = schedule.with_graph(graph);
  const Features features = features_of(wired);
  const auto crosses = [&](const Edge& edge) {
    return wired.placement().rank_of(edge.from) != wired.placement().rank_of(edge.to);
  };
  // Lists that have reductions already may still lack their messages.
  const bool lacks_messages = !features.communication && std::ranges::any_of(wired.graph().edges(), crosses);
  if (features.computations_only() || lacks_messages) return lower(wired);
  require_valid(wired);
  return wired;
}

// Of all stages, each says which one it is; a process has some of them.
void require_in_order(const Stages& stages, const Schedule& schedule, bool all) {
  if (all && static_cast<int>(stages.size()) != schedule.stages()) {
    throw PipelineError("there are " + std::to_string(stages.size()) + " stages, and the schedule is for " +
                        std::to_string(schedule.stages()) + ".");
  }
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const PipelineStage& stage = stages[i];
    const bool in_order =
        all ? stage.stage_index() == static_cast<int>(i) : i == 0 || stages[i - 1].stage_index() < stage.stage_index();
    if (in_order && stage.num_stages() == schedule.stages()) continue;
    throw PipelineError("stage " + std::to_string(i) + " of the list says that it is stage " +
                        std::to_string(stage.stage_index()) + " of " + std::to_string(stage.num_stages()) +
                        "; they should be in order.");
  }
}

// Replicas run one schedule, so they are connected alike and share the same parameters.
void require_alike(const std::vector<StagedModel>& replicas) {
  for (std::size_t i = 1; i < replicas.size(); ++i) {
    const bool same_wiring = replicas[i].wiring() == replicas.front().wiring();
    if (same_wiring && replicas[i].shared_parameters() == replicas.front().shared_parameters()) continue;
    throw PipelineError("replica " + std::to_string(i) + " has other " +
                        (same_wiring ? "shared parameters" : "wiring") +
                        " than replica 0.\n  Hint: build all replicas of a model in the same way.");
  }
}

// Returns the first of the replicas.
const StagedModel& checked(const std::vector<StagedModel>& replicas, const Schedule& schedule, bool all) {
  if (replicas.empty()) throw PipelineError("there are no replicas of a model; expected at least 1.");
  if (!all && replicas.size() > 1) {
    throw PipelineError("there are stages of " + std::to_string(replicas.size()) +
                        " replicas in this process; when ranks are processes, each has those of one.");
  }
  for (const StagedModel& model : replicas) require_in_order(model.stages(), schedule, all);
  require_alike(replicas);
  return replicas.front();
}

// What all processes should have alike.
std::uint64_t agreement_on(const Schedule& lowered_schedule, const Wiring& wiring, const SharedParameters& shared,
                           const PipelineOptions& options) {
  Digest digest;
  digest.add(to_csv(lowered_schedule)).add(options.sharded ? 1 : 0).add(options.loss_weight ? 1 : 0);
  digest.add(static_cast<std::int64_t>(wiring.links().size()));
  for (const Wiring::Link& link : wiring.links()) {
    digest.add(link.from).add(link.to).add(link.values ? static_cast<std::int64_t>(link.values->size()) : -1);
    if (!link.values) continue;
    for (const StageOutput& value : *link.values) digest.add(value.stage).add(value.output);
  }
  for (const std::vector<SharedParameter>& places : shared) {
    digest.add(static_cast<std::int64_t>(places.size()));
    for (const SharedParameter& place : places) digest.add(place.stage).add(place.name);
  }
  return digest.value();
}

// Of tensors their form, and of all else what it is: a stage may give other shapes for another number.
void add_sizes(Digest& digest, const c10::IValue& value) {
  for_each_leaf(value, Path(""), [&](const c10::IValue& leaf, const Path&) {
    if (!leaf.isTensor() || !leaf.toTensor().defined()) {
      digest.add(leaf.isTensor() ? "none" : describe(leaf));
      return;
    }
    const at::Tensor& tensor = leaf.toTensor();
    digest.add(static_cast<std::int64_t>(tensor.scalar_type())).add(tensor.requires_grad() ? 1 : 0).add(tensor.dim());
    for (std::int64_t i = 0; i < tensor.dim(); ++i) digest.add(tensor.size(i)).add(tensor.stride(i));
  });
}

void add_sizes(Digest& digest, const Batch& batch) {
  for (const c10::IValue& value : batch.args) add_sizes(digest, value);
  for (const auto& [stage, kwargs] : batch.kwargs) {
    digest.add(stage);
    for (const auto& [name, value] : kwargs) add_sizes(digest.add(name), value);
  }
  add_sizes(digest, batch.target);
}

std::vector<StagedModel> only(StagedModel model) {
  std::vector<StagedModel> replicas;
  replicas.push_back(std::move(model));
  return replicas;
}

// A number for each pipeline of this process: one that follows another on the same transport learns its own shapes.
std::int64_t next_pipeline() {
  static std::atomic<std::int64_t> count = 0;
  return ++count;
}

}  // namespace

struct Pipeline::State {
  State(std::vector<StagedModel> replicas, const Schedule& schedule, PipelineOptions given_options)
      : options(std::move(given_options)),
        wiring(checked(replicas, schedule, options.transport == nullptr).wiring()),
        shared(replicas.front().shared_parameters()),
        training(lowered(schedule, graph_of(wiring, shared))),
        evaluation(drop_backwards(training)),
        without_reductions(drop_reductions(training)),
        ranks(std::move(replicas), training,
              {.transport = options.transport,
               .shared = shared,
               .sharded = options.sharded,
               .agreement = agreement_on(training, wiring, shared, options),
               .has_loss = options.loss != nullptr || !options.functions.instead.empty(),
               .functions = &options.functions,
               .timeout = options.timeout,
               .intra_op_threads = options.intra_op_threads}) {}

  int replicas_here() const { return static_cast<int>(ranks.models().size()); }

  void require_loss_and_target(const Batch& batch) const;
  Batch batch_of(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                 const StepOptions& step_options) const;
  std::uint64_t signature_of(const Batch& batch, bool backward) const;
  void set_all_seeds(std::vector<StepWork>& works) const;
  std::shared_ptr<StepRun> prepare(const Batch& batch, const StepOptions& step_options, bool backward);
  StepResult run(const std::function<std::shared_ptr<StepRun>()>& prepare_step, const Schedule& schedule);
  StepResult run_unless_exiting(const std::function<std::shared_ptr<StepRun>()>& prepare_step,
                                const Schedule& schedule);

  PipelineOptions options;
  Wiring wiring;
  SharedParameters shared;
  Schedule training;
  Schedule evaluation;
  Schedule without_reductions;
  std::shared_ptr<StepRun> last = std::make_shared<StepRun>();
  std::int64_t number = next_pipeline();
  std::int64_t steps = 0;
  Ranks ranks;
};

// For a step: functions of the user's may compute a loss of their own.
void Pipeline::State::require_loss_and_target(const Batch& batch) const {
  if (!options.functions.instead.empty() || !ranks.has_stage(training.stages() - 1)) return;
  if (!options.loss && !batch.target.isNone()) {
    throw PipelineError("there is a target, " + describe(batch.target) +
                        ", and no loss function that compares the output with it.\n  Hint: PipelineOptions::loss; eval "
                        "needs neither.");
  }
  if (!options.loss || !batch.target.isNone()) return;
  std::string arguments = "the arguments";
  for (const c10::IValue& argument : batch.args) {
    if (arguments == "the arguments") arguments += " (args[0] is " + describe(argument) + ")";
  }
  throw PipelineError(
      "the target is missing: there is a loss function, and " + arguments +
      " come without anything to compare the output with.\n  Hint: step(args, kwargs, target); at::Tensor() "
      "is the target of a loss that takes none.");
}

// As far as stages of this process need it.
Batch Pipeline::State::batch_of(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                                const StepOptions& step_options) const {
  Batch batch;
  if (ranks.has_stage(0)) {
    batch.args = args;
    batch.kwargs[0] = kwargs;
  }
  if (ranks.has_stage(training.stages() - 1)) batch.target = target;
  for (const auto& [stage, own] : step_options.stage_kwargs) {
    if (stage < 1 || stage >= training.stages()) {
      throw PipelineError("there are keyword arguments for stage " + std::to_string(stage) +
                          "; those of later stages are for 1 to " + std::to_string(training.stages() - 1) + ".");
    }
    if (ranks.has_stage(stage)) batch.kwargs[stage] = own;
  }
  return batch;
}

// See Transport::begin_step.
std::uint64_t Pipeline::State::signature_of(const Batch& batch, bool backward) const {
  Digest signature;
  signature.add(number).add(backward ? 1 : 0).add(batch.target.isNone() ? 0 : 1);
  signature.add(at::autocast::is_autocast_enabled(at::kCPU) ? 1 : 0);
  signature.add(static_cast<std::int64_t>(at::autocast::get_autocast_dtype(at::kCPU)));
  add_sizes(signature, batch);
  // What is frozen gives activations that need no gradient.
  for (const PipelineStage& stage : ranks.models().front().stages()) {
    for (const auto& [name, parameter] : stage.module().parameters) signature.add(parameter.requires_grad() ? 1 : 0);
  }
  return signature.value();
}

// Of thread ranks, which are all here; process ranks share their weights first.
void Pipeline::State::set_all_seeds(std::vector<StepWork>& works) const {
  double total = 0;
  for (const StepWork& work : works) {
    for (const double weight : work.loss_weights) total += weight;
  }
  for (StepWork& work : works) set_seeds(work, work.total_weight.value_or(total), static_cast<int>(works.size()));
}

std::shared_ptr<StepRun> Pipeline::State::prepare(const Batch& batch, const StepOptions& step_options, bool backward) {
  const auto count = static_cast<std::size_t>(training.microbatches());
  const std::size_t all = count * static_cast<std::size_t>(replicas_here());
  if (!step_options.weights.empty() && step_options.weights.size() != all) {
    throw PipelineError("there are " + std::to_string(step_options.weights.size()) + " weights for " +
                        std::to_string(all) + " microbatches.");
  }
  if (backward) require_loss_and_target(batch);
  std::vector<Batch> parts{batch};
  if (replicas_here() > 1) parts = split_batch(batch, options.specs, replicas_here(), "replicas");
  // Between threads nobody has to learn shapes.
  const std::uint64_t signature = ranks.are_threads() ? 0 : signature_of(batch, backward);

  auto step = std::make_shared<StepRun>();
  for (std::size_t replica = 0; replica < parts.size(); ++replica) {
    StepWork& work = step->works.emplace_back();
    work.microbatches = split_batch(parts[replica], options.specs, training.microbatches(), "microbatches");
    alias_chunks(work.microbatches, parts[replica]);
    work.has_target = !batch.target.isNone();
    work.weights.assign(count, options.scale_grads ? 1.0 / static_cast<double>(count) : 1.0);
    if (options.loss_weight) {
      work.loss_weights.assign(count, 0);
      work.total_weight = step_options.total_weight;
    }
    work.scale_grads = options.scale_grads;
    work.seeds_are_given = !step_options.weights.empty();
    if (work.seeds_are_given) {
      std::copy_n(step_options.weights.begin() + static_cast<std::ptrdiff_t>(replica * count), count,
                  work.weights.begin());
    }
    work.wiring = &wiring;
    work.backward = backward;
    work.autograd = backward && options.backward_requires_autograd;
    work.loss = options.loss;
    work.loss_kwargs = step_options.loss_kwargs;
    if (options.loss_weight && !batch.target.isNone()) weigh(work, options.loss_weight);
    work.keep_outputs = step_options.return_outputs;
    work.output_merge_spec = &options.output_merge_spec;
    work.results_everywhere = step_options.results_everywhere;
    work.signature = signature;
    // Replicas draw numbers of their own.
    work.seed = options.seed + static_cast<std::uint64_t>(ranks.first_replica()) + replica;
    work.step = step_options.number.value_or(steps);
    work.timeout = options.timeout;
    work.outputs.resize(count);
    work.losses.resize(count);
    work.loss_terms.resize(count);
  }
  if (options.loss_weight && ranks.are_threads()) set_all_seeds(step->works);
  step->records.assign(parts.size(), Record(static_cast<std::size_t>(training.ranks())));
  if (backward) {
    step->inputs = {to_value(batch.args), batch.target, to_value(step_options.loss_kwargs)};
    for (const auto& [stage, kwargs] : batch.kwargs) step->inputs.push_back(to_value(kwargs));
  }
  return step;
}

StepResult Pipeline::State::run(const std::function<std::shared_ptr<StepRun>()>& prepare_step,
                                const Schedule& schedule) {
  const Ranks::Call call(ranks);
  std::shared_ptr<StepRun> step;
  try {
    step = prepare_step();
  } catch (const std::exception& error) {
    // Other processes have begun, and wait for this one.
    ranks.refuse(error.what());
    throw;
  }
  step->schedule = &schedule;
  last = step;
  StepResult result;
  ranks.run(step, [&] { result = take_results(step->works, options.output_merge_spec); });
  // A step that failed is not counted: another with the same batch draws the same random numbers.
  ++steps;
  // Only the record is asked for later.
  step->works.clear();
  return result;
}

// While the process exits on another thread, nothing that a step could return or throw is of use to anybody: an operator
// of the caller would fail, and an exception that nobody catches would abort the process. The thread is held here until the
// process has ended; only when somebody waits for the thread to end, it gets the error in the end.
StepResult Pipeline::State::run_unless_exiting(const std::function<std::shared_ptr<StepRun>()>& prepare_step,
                                               const Schedule& schedule) {
  try {
    if (ExitHook::is_exiting()) throw PipelineError("the process exits.");
    return run(prepare_step, schedule);
  } catch (...) {
    if (ExitHook::is_exiting() && !ExitHook::is_exiting_thread()) std::this_thread::sleep_for(kHeldAtExit);
    throw;
  }
}

Pipeline::Pipeline(StagedModel model, const Schedule& schedule, PipelineOptions options)
    : Pipeline(only(std::move(model)), schedule, std::move(options)) {}

Pipeline::Pipeline(std::vector<StagedModel> replicas, const Schedule& schedule, PipelineOptions options) {
  const std::shared_ptr<Transport> transport = options.transport;
  try {
    state_ = std::make_unique<State>(std::move(replicas), schedule, std::move(options));
  } catch (const std::exception& error) {
    // The others wait for it.
    if (transport) transport->abort("process " + std::to_string(transport->rank()) + ": " + error.what());
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
              "step computes gradients, which are switched off on this thread.\n  Hint: eval needs none.");
        }
        if (!features_of(state_->training).backward) {
          throw PipelineError("this schedule has no backwards.\n  Hint: eval runs forwards alone.");
        }
        return state_->prepare(state_->batch_of(args, kwargs, target, options), options, /*backward=*/true);
      },
      options.reduce ? state_->training : state_->without_reductions);
}

StepResult Pipeline::eval(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                          const StepOptions& options) {
  return state_->run_unless_exiting(
      [&] { return state_->prepare(state_->batch_of(args, kwargs, target, options), options, /*backward=*/false); },
      state_->evaluation);
}

void Pipeline::abandon() {
  state_->ranks.abandon();
}

const Schedule& Pipeline::schedule() const {
  return state_->training;
}
int Pipeline::replicas() const {
  return state_->replicas_here();
}
const std::vector<PipelineStage>& Pipeline::stages(int replica) const {
  return state_->ranks.models().at(static_cast<std::size_t>(replica)).stages();
}
const Record& Pipeline::record(int replica) const {
  return state_->last->records.at(static_cast<std::size_t>(replica));
}
const Schedule& Pipeline::recorded_schedule() const {
  return state_->last->schedule == nullptr ? state_->training : *state_->last->schedule;
}

}  // namespace penstock
