#include "penstock/runtime/pipeline.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "penstock/runtime/executor.h"
#include "penstock/runtime/rank_threads.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"
#include "penstock/transport/threads.h"

namespace penstock {
namespace {

using Stages = std::vector<PipelineStage>;

// Parameters that several stages have: those that were named, and those that are one tensor in several stages.
std::vector<std::vector<SharedParameter>> find_shared(const Stages& stages,
                                                      const std::vector<std::vector<SharedParameter>>& named) {
  std::map<const void*, std::vector<SharedParameter>> by_tensor;
  for (const PipelineStage& stage : stages) {
    for (const auto& [name, parameter] : stage.module().parameters) {
      by_tensor[parameter.unsafeGetTensorImpl()].push_back({stage.stage_index(), name});
    }
  }
  std::vector<std::vector<SharedParameter>> shared = named;
  for (auto& [tensor, places] : by_tensor) {
    if (places.front().stage != places.back().stage) shared.push_back(std::move(places));
  }
  return shared;
}

// The graph of a wiring's links, with the stages that share parameters.
StageGraph graph_of(const Wiring& wiring, const std::vector<std::vector<SharedParameter>>& shared) {
  StageGraph graph(wiring.stages());
  for (const Wiring::Link& link : wiring.links()) graph.add_edge(link.from, link.to);
  for (const auto& places : shared) {
    std::vector<int> stages;
    for (const SharedParameter& place : places) stages.push_back(place.stage);
    graph.share(std::move(stages));
  }
  return graph;
}

Schedule lowered(const Schedule& schedule, const StageGraph& graph) {
  Schedule wired = schedule.with_graph(graph);
  if (features_of(wired).computations_only()) return lower(wired);
  require_valid(wired);
  return wired;
}

// Where a rank was at a moment.
struct Sighting {
  int position = 0;
  double seconds_there = 0;
};

// Something that went wrong, as its rank saw it.
struct Failure {
  // Of all replicas' ranks.
  int rank = 0;
  int position = 0;
  // Where all ranks were then.
  std::vector<Sighting> others;
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
  State(std::vector<Stages> given_replicas, const Wiring& given_wiring, const Schedule& schedule,
        PipelineOptions given_options)
      : replicas(std::move(given_replicas)),
        wiring(given_wiring),
        options(std::move(given_options)),
        shared(find_shared(checked_stages(schedule), options.shared)),
        training(lowered(schedule, graph_of(wiring, shared))),
        evaluation(drop_backwards(training)),
        without_reductions(drop_reductions(training)),
        threads(ranks() * static_cast<int>(replicas.size()), options.intra_op_threads) {
    connect();
    if (replicas.size() > 1) on_all_ranks([this](int rank) { share_parameters(rank); });
  }

  int ranks() const { return training.ranks(); }
  int replica_of(int rank) const { return rank / ranks(); }

  const Stages& checked_stages(const Schedule& schedule) const {
    for (const Stages& stages : replicas) {
      if (static_cast<int>(stages.size()) != schedule.stages()) {
        throw PipelineError("there are " + std::to_string(stages.size()) + " stages, and the schedule is for " +
                            std::to_string(schedule.stages()) + ".");
      }
      for (std::size_t i = 0; i < stages.size(); ++i) {
        if (stages[i].stage_index() == static_cast<int>(i) && stages[i].num_stages() == schedule.stages()) continue;
        throw PipelineError("stage " + std::to_string(i) + " of the list says that it is stage " +
                            std::to_string(stages[i].stage_index()) + " of " + std::to_string(stages[i].num_stages()) +
                            "; they should be in order.");
      }
    }
    if (replicas.empty()) throw PipelineError("there are no stages.");
    return replicas.front();
  }

  void connect();
  std::map<int, std::vector<SharedSum>> shared_sums(int rank);
  void share_parameters(int rank);
  // A new group of the ranks that have the same stages in all replicas.
  std::shared_ptr<Group> replicas_of(int rank);
  void on_all_ranks(const std::function<void(int)>& act);
  std::vector<StepWork> prepare(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                                const StepOptions& step_options, bool backward);
  StepResult run(std::vector<StepWork> works, const Schedule& schedule);
  [[noreturn]] void fail(const StepWork& work, const std::vector<Failure>& failures);

  std::vector<Stages> replicas;
  Wiring wiring;
  PipelineOptions options;
  std::vector<std::vector<SharedParameter>> shared;
  Schedule training;
  Schedule evaluation;
  Schedule without_reductions;
  // One for each rank of each replica, as are executors and records.
  std::vector<std::unique_ptr<Transport>> transports;
  std::vector<Executor> executors;
  std::vector<Record> records;
  const Schedule* recorded = &training;
  std::int64_t steps = 0;
  RankThreads threads;
};

// New ends for all ranks, with nothing under way.
void Pipeline::State::connect() {
  executors.clear();
  transports = thread_transports(ranks() * static_cast<int>(replicas.size()));
  for (int rank = 0; rank < static_cast<int>(transports.size()); ++rank) {
    std::map<int, PipelineStage*> own;
    for (const int stage : training.placement().stages_of(rank % ranks())) {
      own[stage] = &replicas[static_cast<std::size_t>(replica_of(rank))][static_cast<std::size_t>(stage)];
      if (own[stage]->sync() != nullptr) own[stage]->sync()->join(replicas_of(rank));
    }
    executors.emplace_back(*transports[static_cast<std::size_t>(rank)], replica_of(rank) * ranks(), std::move(own),
                           shared_sums(rank), options.functions);
  }
}

// What a rank has of the parameters that stages share.
std::map<int, std::vector<SharedSum>> Pipeline::State::shared_sums(int rank) {
  std::map<int, std::vector<SharedSum>> sums;
  Stages& stages = replicas[static_cast<std::size_t>(replica_of(rank))];
  for (const auto& places : shared) {
    std::map<const void*, int> owners;
    std::set<int> members;
    std::vector<at::Tensor> own;
    for (const SharedParameter& place : places) {
      const auto& parameters = stages[static_cast<std::size_t>(place.stage)].module().parameters;
      const auto found = std::find_if(parameters.begin(), parameters.end(),
                                      [&](const auto& named) { return named.first == place.name; });
      if (found == parameters.end()) {
        throw PipelineError("stage " + std::to_string(place.stage) + " has no parameter '" + place.name +
                            "' to share.");
      }
      const int holder = training.placement().rank_of(place.stage);
      // One tensor in several stages gathers their gradients by itself; the first rank that has it speaks for it.
      if (!owners.try_emplace(found->second.unsafeGetTensorImpl(), holder).second) continue;
      members.insert(holder);
      if (holder == rank % ranks()) own.push_back(found->second);
    }
    if (own.empty() || (members.size() == 1 && own.size() == 1 && replicas.size() == 1)) continue;
    std::vector<int> group;
    for (int replica = 0; replica < static_cast<int>(replicas.size()); ++replica) {
      for (const int member : members) group.push_back(replica * ranks() + member);
    }
    sums[training.graph().group_of(places.front().stage)].emplace_back(
        std::move(own), transports[static_cast<std::size_t>(rank)]->group(group), static_cast<int>(replicas.size()));
  }
  return sums;
}

std::shared_ptr<Group> Pipeline::State::replicas_of(int rank) {
  std::vector<int> group;
  for (int replica = 0; replica < static_cast<int>(replicas.size()); ++replica) {
    group.push_back(replica * ranks() + rank % ranks());
  }
  return transports[static_cast<std::size_t>(rank)]->group(group);
}

void Pipeline::State::share_parameters(int rank) {
  Stages& stages = replicas[static_cast<std::size_t>(replica_of(rank))];
  for (const int index : training.placement().stages_of(rank % ranks())) {
    PipelineStage& stage = stages[static_cast<std::size_t>(index)];
    std::vector<bool> is_shared;
    for (const auto& [name, parameter] : stage.module().parameters) {
      is_shared.push_back(std::any_of(shared.begin(), shared.end(), [&, &own = name](const auto& places) {
        return std::any_of(places.begin(), places.end(),
                           [&](const SharedParameter& one) { return one.stage == index && one.name == own; });
      }));
    }
    auto members = replicas_of(rank);
    const Deadline deadline = Clock::now() + options.timeout;
    stage.set_sync(options.sharded ? shard_parameters(stage.module(), is_shared, index, std::move(members), deadline)
                                   : replicate_parameters(stage.module(), is_shared, std::move(members), deadline));
  }
}

// Outside of a step. Throws what the first of them throws.
void Pipeline::State::on_all_ranks(const std::function<void(int)>& act) {
  std::mutex mutex;
  std::exception_ptr first;
  threads.run([&](int rank) {
    try {
      act(rank);
    } catch (...) {
      transports[static_cast<std::size_t>(rank)]->abort("rank " + std::to_string(rank) + " has failed");
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
  });
  if (first) std::rethrow_exception(first);
}

std::vector<StepWork> Pipeline::State::prepare(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                                               const StepOptions& step_options, bool backward) {
  Batch batch{.args = args, .kwargs = step_options.stage_kwargs, .target = target};
  for (const auto& [stage, own] : batch.kwargs) {
    if (stage >= 1 && stage < training.stages()) continue;
    throw PipelineError("there are keyword arguments for stage " + std::to_string(stage) +
                        "; those of later stages are for 1 to " + std::to_string(training.stages() - 1) + ".");
  }
  batch.kwargs[0] = kwargs;
  const auto count = static_cast<std::size_t>(training.microbatches());
  if (!step_options.weights.empty() && step_options.weights.size() != count * replicas.size()) {
    throw PipelineError("there are " + std::to_string(step_options.weights.size()) + " weights for " +
                        std::to_string(count * replicas.size()) + " microbatches.");
  }
  std::vector<Batch> parts{batch};
  if (replicas.size() > 1) parts = split_batch(batch, options.specs, static_cast<int>(replicas.size()), "replicas");

  std::vector<StepWork> works;
  for (std::size_t replica = 0; replica < parts.size(); ++replica) {
    StepWork& work = works.emplace_back();
    work.microbatches = split_batch(parts[replica], options.specs, training.microbatches(), "microbatches");
    work.has_target = !target.isNone();
    work.weights.assign(count, options.scale_grads ? 1.0 / static_cast<double>(count) : 1.0);
    if (!step_options.weights.empty()) {
      std::copy_n(step_options.weights.begin() + static_cast<std::ptrdiff_t>(replica * count), count,
                  work.weights.begin());
    }
    work.wiring = &wiring;
    work.backward = backward;
    work.autograd = backward && options.backward_requires_autograd;
    work.loss = options.loss;
    work.loss_kwargs = step_options.loss_kwargs;
    work.keep_outputs = step_options.return_outputs;
    // Replicas draw numbers of their own.
    work.seed = options.seed + replica;
    work.step = steps;
    work.timeout = options.timeout;
    work.outputs.resize(count);
    work.losses.resize(count);
    work.loss_terms.resize(count);
  }
  ++steps;
  return works;
}

StepResult Pipeline::State::run(std::vector<StepWork> works, const Schedule& schedule) {
  recorded = &schedule;
  records.assign(works.size(), Record(static_cast<std::size_t>(ranks())));
  std::vector<Progress> progress(executors.size());
  std::mutex mutex;
  std::vector<Failure> failures;
  const auto began = Clock::now();
  for (StepWork& work : works) {
    work.schedule = &schedule;
    work.began = began;
  }
  for (std::size_t rank = 0; rank < executors.size(); ++rank) {
    executors[rank].begin(works[static_cast<std::size_t>(replica_of(static_cast<int>(rank)))]);
  }
  if (works.front().backward) {
    for (Executor& executor : executors) executor.begin_sums();
  }
  threads.run([&](int rank) {
    const auto at = static_cast<std::size_t>(rank);
    const auto replica = static_cast<std::size_t>(replica_of(rank));
    Failure failure;
    failure.rank = rank;
    try {
      executors[at].run(works[replica], records[replica][static_cast<std::size_t>(rank % ranks())], progress[at]);
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
    const auto now = Clock::now() - began;
    for (const Progress& other : progress) {
      const std::chrono::duration<double> there = now - std::chrono::nanoseconds(other.since.load());
      failure.others.push_back({.position = other.position.load(), .seconds_there = there.count()});
    }
    transports[at]->abort("rank " + std::to_string(rank) + " has failed");
    const std::lock_guard lock(mutex);
    failures.push_back(std::move(failure));
  });
  if (!failures.empty()) fail(works.front(), failures);

  StepResult result;
  std::vector<c10::IValue> outputs;
  for (StepWork& work : works) {
    std::move(work.outputs.begin(), work.outputs.end(), std::back_inserter(outputs));
    if (work.losses.front().defined()) {
      std::move(work.losses.begin(), work.losses.end(), std::back_inserter(result.losses));
    }
    for (auto& by_stage : work.loss_terms) {
      std::vector<at::Tensor>& terms = result.loss_terms.emplace_back();
      for (auto& [stage, own] : by_stage) terms.insert(terms.end(), own.begin(), own.end());
    }
  }
  if (works.front().keep_outputs) result.output = merge_chunks(outputs, options.output_merge_spec);
  return result;
}

void Pipeline::State::fail(const StepWork& work, const std::vector<Failure>& failures) {
  const Schedule& schedule = *work.schedule;
  // Those that were told of another's failure only follow it.
  const auto found = std::find_if(failures.begin(), failures.end(), [](const Failure& one) { return !one.aborted; });
  const Failure& first = found == failures.end() ? failures.front() : *found;
  const auto name = [&](int rank) {
    const std::string own = "rank " + std::to_string(rank % ranks());
    return replicas.size() == 1 ? own : "replica " + std::to_string(replica_of(rank)) + ", " + own;
  };
  const auto actions = schedule.actions(first.rank % ranks());
  std::string message = name(first.rank);
  if (first.position >= 0 && first.position < static_cast<int>(actions.size())) {
    const Action& action = actions[static_cast<std::size_t>(first.position)];
    message += ", stage " + std::to_string(action.stage) + ", " + to_string(action);
    if (action.microbatch != kNone) message += " (microbatch " + std::to_string(action.microbatch) + ")";
  }
  message += ": " + first.what;
  if (first.why == TransportError::Why::Late) {
    message += " of " + seconds_text(std::chrono::duration<double>(work.timeout).count()) + ".";
  }
  for (int rank = 0; rank < static_cast<int>(first.others.size()); ++rank) {
    if (rank == first.rank) continue;
    const Sighting& seen = first.others[static_cast<std::size_t>(rank)];
    const auto list = schedule.actions(rank % ranks());
    message += "\n  " + name(rank) + ": ";
    if (seen.position < 0) {
      message += "had not begun";
    } else if (seen.position >= static_cast<int>(list.size())) {
      message += "had ended";
    } else {
      message += "was in " + to_string(list[static_cast<std::size_t>(seen.position)]) + " for " +
                 seconds_text(seen.seconds_there);
    }
  }
  message +=
      "\n" +
      table_of(
          schedule,
          {.mark_rank = first.rank % ranks(), .mark_position = first.position, .steps_around = 3, .most_ranks = 8});
  // Nothing of it is left, and the next step finds ends of its own.
  for (Executor& executor : executors) executor.take_back();
  connect();
  throw PipelineError(message);
}

Pipeline::Pipeline(std::vector<PipelineStage> stages, const Schedule& schedule, PipelineOptions options)
    : Pipeline(std::move(stages), Wiring(schedule.stages()), schedule, std::move(options)) {}

Pipeline::Pipeline(std::vector<std::vector<PipelineStage>> replicas, const Wiring& wiring, const Schedule& schedule,
                   PipelineOptions options)
    : state_(std::make_unique<State>(std::move(replicas), wiring, schedule, std::move(options))) {}

Pipeline::Pipeline(std::vector<PipelineStage> stages, const Wiring& wiring, const Schedule& schedule,
                   PipelineOptions options)
    : state_(nullptr) {
  std::vector<Stages> replicas;
  replicas.push_back(std::move(stages));
  state_ = std::make_unique<State>(std::move(replicas), wiring, schedule, std::move(options));
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

StepResult Pipeline::step(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                          const StepOptions& options) {
  if (state_->options.backward_requires_autograd && !c10::GradMode::is_enabled()) {
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
const std::vector<PipelineStage>& Pipeline::stages(int replica) const {
  return state_->replicas.at(static_cast<std::size_t>(replica));
}
const Record& Pipeline::record(int replica) const {
  return state_->records.at(static_cast<std::size_t>(replica));
}
const Schedule& Pipeline::recorded_schedule() const {
  return *state_->recorded;
}

}  // namespace penstock
