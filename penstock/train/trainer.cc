#include "penstock/train/trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <iterator>
#include <map>
#include <numeric>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "penstock/runtime/error.h"
#include "penstock/schedule/simulate.h"
#include "penstock/stage/parameters.h"
#include "penstock/tensor/intra_op_threads.h"

namespace penstock {
namespace {

// Its stages that belong to this process.
std::vector<PipelineStage> build(const Model& model, const Schedule& schedule, const Transport* transport,
                                 MemoryWatch& memory, int replica) {
  std::vector<PipelineStage> stages;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int rank = schedule.placement().rank_of(stage);
    if (transport != nullptr && rank != transport->rank() % schedule.ranks()) continue;
    const MemoryWatch::Scope scope(memory, rank, replica);
    stages.push_back(model.build_stage(stage));
  }
  return stages;
}

Kwargs kwargs_of(const Batch& batch) {
  const auto found = batch.kwargs.find(0);
  return found == batch.kwargs.end() ? Kwargs() : found->second;
}

double mean(const std::vector<double>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

}  // namespace

Trainer::Trainer(std::vector<std::unique_ptr<Model>> replicas, const Data& data, const Schedule& schedule,
                 TrainerOptions options)
    : replicas_(std::move(replicas)),
      data_(data),
      options_(std::move(options)),
      memory_(schedule.ranks(), schedule.stages(), static_cast<int>(replicas_.size())),
      names_(replicas_.front()->parameter_names()) {
  const IntraOpThreads threads(options_.intra_op_threads);
  std::vector<std::vector<PipelineStage>> stages;
  for (std::size_t replica = 0; replica < replicas_.size(); ++replica) {
    stages.push_back(
        build(*replicas_[replica], schedule, options_.transport.get(), memory_, static_cast<int>(replica)));
  }
  PipelineOptions pipeline_options;
  pipeline_options.transport = options_.transport;
  pipeline_options.loss = [this](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    return data_.loss(output, target);
  };
  pipeline_options.sharded = options_.sharded;
  pipeline_options.shared = replicas_.front()->shared_parameters();
  pipeline_options.timeout = options_.timeout;
  pipeline_options.intra_op_threads = options_.intra_op_threads;
  pipeline_options.seed = options_.seed;
  memory_.watch(pipeline_options.functions);
  pipeline_ =
      std::make_unique<Pipeline>(std::move(stages), replicas_.front()->wiring(), schedule, std::move(pipeline_options));
  if (options_.transport != nullptr) {
    num_replicas_ = options_.transport->ranks() / schedule.ranks();
    std::vector<int> all(static_cast<std::size_t>(options_.transport->ranks()));
    std::iota(all.begin(), all.end(), 0);
    everyone_ = options_.transport->group(all);
    std::vector<int> alike;
    for (int replica = 0; replica < num_replicas_; ++replica) {
      alike.push_back(options_.transport->rank() % schedule.ranks() + replica * schedule.ranks());
    }
    peers_ = options_.transport->group(alike);
  } else {
    num_replicas_ = static_cast<int>(replicas_.size());
  }
  for (std::size_t local = 0; local < replicas_.size(); ++local) {
    for (const PipelineStage& stage : pipeline_->stages(static_cast<int>(local))) {
      own_.push_back({.replica = static_cast<int>(replica_of(local)),
                      .stage = &stage,
                      .optimizer = Optimizer(options_.optimizer, stage.parameters()),
                      .positions = positions_in(stage)});
    }
  }
}

Trainer::~Trainer() = default;

std::int64_t Trainer::replica_of(std::size_t local) const {
  if (options_.transport == nullptr) return static_cast<std::int64_t>(local);
  return options_.transport->rank() / pipeline_->schedule().ranks();
}

bool Trainer::speaks() const {
  return options_.transport == nullptr || options_.transport->rank() == 0;
}

void Trainer::finish(const std::function<std::unique_ptr<Work>()>& begin) const {
  Transport& transport = *options_.transport;
  try {
    begin()->wait(deadline_after(options_.timeout));
  } catch (const TransportError& error) {
    const std::string own = "rank " + std::to_string(transport.rank());
    transport.abort(own + " has failed");
    std::ostringstream message;
    message << own << ", behind step " << steps_done_ << ": " << error.what();
    if (error.why() == TransportError::Why::Late) {
      message << " of " << std::chrono::duration<double>(options_.timeout).count() << " s";
    }
    const auto reports = transport.reports(Clock::now() + Transport::kReportTime);
    for (std::size_t rank = 0; rank < reports.size(); ++rank) {
      if (!reports[rank]) message << "\n  rank " << rank << ": did not answer";
      // One that was late is still in its step.
      if (reports[rank] && !reports[rank]->empty()) message << "\n  rank " << rank << ": was in a step";
    }
    throw PipelineError(message.str());
  }
}

std::vector<double> Trainer::summed(std::vector<double> numbers) {
  if (everyone_ == nullptr) return numbers;
  const at::Tensor all = at::tensor(numbers, at::kDouble);
  finish([&] { return everyone_->all_reduce({all}); });
  std::copy_n(all.const_data_ptr<double>(), numbers.size(), numbers.begin());
  return numbers;
}

// A process gives the pipeline the part of its own replica; between threads the pipeline shares out.
Batch Trainer::own_part(const Batch& batch) const {
  if (options_.transport == nullptr || num_replicas_ == 1) return batch;
  return split_batch(batch, {}, num_replicas_, "replicas")[static_cast<std::size_t>(replica_of(0))];
}

StepReport Trainer::step(bool wants_to_stop) {
  const auto began = Clock::now();
  const IntraOpThreads threads(options_.intra_op_threads);
  // Ranks let go of what is made here.
  const MemoryWatch::Scope nobody(memory_, -1);
  StepReport report{.step = steps_done_ + 1};
  try {
    Figures figures = run_batches(report);
    for (const Own& own : own_) {
      for (const auto& [name, parameter] : own.stage->parameters()) {
        at::Tensor& gradient = parameter.mutable_grad();
        if (gradient.defined()) gradient = dense(gradient);
      }
    }
    figures.wants_to_stop = wants_to_stop ? 1 : 0;
    sum_up(figures);
    report.loss = mean(figures.losses);
    report.bubble = figures.whole > 0 ? 1 - figures.computed / figures.whole : 0;
    report.somebody_wants_to_stop = figures.wants_to_stop > 0;
    for (const double bytes : figures.memory) report.memory.push_back(static_cast<std::int64_t>(bytes));
    if (options_.clip > 0) report.gradient_norm = clip_gradients();
  } catch (...) {
    // What earlier batches of the step have left.
    for (const Own& own : own_) {
      for (const auto& [name, parameter] : own.stage->parameters()) parameter.mutable_grad().reset();
      // Of shards, what was not reduced lies in the whole.
      for (const auto& [name, parameter] : own.stage->module().parameters) parameter.mutable_grad().reset();
    }
    throw;
  }
  report.learning_rate = options_.learning_rate.at(steps_done_, options_.steps);
  for_each_own([&](Own& own) { own.optimizer.step(report.learning_rate); });
  ++steps_done_;
  report.seconds = std::chrono::duration<double>(Clock::now() - began).count();
  return report;
}

Trainer::Figures Trainer::run_batches(StepReport& report) {
  const Schedule& schedule = pipeline_->schedule();
  const auto microbatches = static_cast<std::size_t>(schedule.microbatches());
  const auto replicas = static_cast<std::size_t>(num_replicas_);
  const auto batches = static_cast<std::size_t>(options_.accumulate);
  Figures figures{.losses = std::vector<double>(batches * replicas * microbatches, 0),
                  .memory = std::vector<double>(static_cast<std::size_t>(schedule.ranks()), 0)};
  for (std::size_t part = 0; part < batches; ++part) {
    StepOptions step;
    step.number = steps_done_ * options_.accumulate + static_cast<std::int64_t>(part);
    const Batch whole = data_.batch(*step.number);
    report.size += data_.size_of(whole);
    const Batch batch = own_part(whole);
    step.weights.assign(microbatches * replicas_.size(), 1.0 / static_cast<double>(microbatches * batches));
    step.reduce = part == batches - 1;
    step.return_outputs = false;
    const StepResult result = pipeline_->step(batch.args, kwargs_of(batch), batch.target, step);
    const std::size_t first = (part * replicas + static_cast<std::size_t>(replica_of(0))) * microbatches;
    for (std::size_t i = 0; i < result.losses.size(); ++i) figures.losses[first + i] = result.losses[i].item<double>();
    for (std::size_t local = 0; local < replicas_.size(); ++local) {
      const Record& record = pipeline_->record(static_cast<int>(local));
      const Timeline timeline = timeline_of(pipeline_->recorded_schedule(), record);
      for (std::size_t rank = 0; rank < record.size(); ++rank) {
        // Of other processes there is nothing.
        if (record[rank].empty()) continue;
        figures.computed += timeline.ranks[rank].work;
        figures.whole += timeline.makespan;
      }
    }
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const bool is_here = options_.transport == nullptr || options_.transport->rank() == rank;
    if (is_here) figures.memory[static_cast<std::size_t>(rank)] = memory_here(rank);
  }
  records_.push_back(pipeline_->record());
  if (records_.size() > kRecords) records_.pop_front();
  return figures;
}

// Each number is one process's, or a sum over all of them.
void Trainer::sum_up(Figures& figures) {
  std::vector<double*> places;
  for (double& loss : figures.losses) places.push_back(&loss);
  for (double& bytes : figures.memory) places.push_back(&bytes);
  for (double* one : {&figures.computed, &figures.whole, &figures.wants_to_stop}) places.push_back(one);
  std::vector<double> numbers;
  for (const double* place : places) numbers.push_back(*place);
  numbers = summed(std::move(numbers));
  for (std::size_t i = 0; i < places.size(); ++i) *places[i] = numbers[i];
}

double Trainer::memory_here(int rank) const {
  return static_cast<double>(memory_.most(rank));
}

// For each of a stage's parameters, its place among all names; none for one that counts in another stage.
std::vector<std::optional<std::size_t>> Trainer::positions_in(const PipelineStage& stage) const {
  const SharedParameters shared = model().shared_parameters();
  std::vector<std::optional<std::size_t>> positions;
  for (const auto& [name, parameter] : stage.parameters()) {
    const SharedParameter here{.stage = stage.stage_index(), .name = name};
    const bool counts_elsewhere = std::ranges::any_of(shared, [&](const std::vector<SharedParameter>& places) {
      return places.front() != here && std::ranges::find(places, here) != places.end();
    });
    const auto found = std::ranges::find(names_, name);
    positions.emplace_back();
    if (!counts_elsewhere && found != names_.end()) positions.back() = static_cast<std::size_t>(found - names_.begin());
  }
  return positions;
}

void Trainer::for_each_own(const std::function<void(Own& own)>& act) {
  const Placement& placement = pipeline_->schedule().placement();
  std::map<std::pair<int, int>, std::vector<Own*>> by_rank;
  for (Own& own : own_) by_rank[{own.replica, placement.rank_of(own.stage->stage_index())}].push_back(&own);
  const auto run = [&](const std::pair<int, int>& place, const std::vector<Own*>& all) {
    const IntraOpThreads threads(options_.intra_op_threads);
    const bool is_only_one = options_.transport != nullptr;
    const MemoryWatch::Scope scope(memory_, place.second, is_only_one ? 0 : place.first);
    for (Own* own : all) act(*own);
  };
  std::vector<std::future<void>> others;
  for (auto it = std::next(by_rank.begin()); it != by_rank.end(); ++it) {
    others.push_back(std::async(std::launch::async, [&run, it] { run(it->first, it->second); }));
  }
  run(by_rank.begin()->first, by_rank.begin()->second);
  for (std::future<void>& other : others) other.get();
}

double Trainer::clip_gradients() {
  for_each_own([&](Own& own) {
    const c10::NoGradGuard no_grad;
    const StageModule::NamedTensors& parameters = own.stage->parameters();
    own.squares.assign(parameters.size(), 0);
    // Replicas that are whole have the same.
    if (own.replica != 0 && !options_.sharded) return;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].second.grad();
      if (gradient.defined()) own.squares[i] = as_real(gradient).to(at::kDouble).square().sum().item<double>();
    }
  });
  std::vector<double> squares(names_.size(), 0);
  for (const Own& own : own_) {
    for (std::size_t i = 0; i < own.squares.size(); ++i) {
      if (own.positions[i]) squares[*own.positions[i]] += own.squares[i];
    }
  }
  squares = summed(std::move(squares));
  const double norm = std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0));
  if (norm <= options_.clip) return norm;
  for_each_own([&](Own& own) {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, parameter] : own.stage->parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(options_.clip / norm);
    }
  });
  return norm;
}

void Trainer::set_training(bool training) {
  for (const auto& replica : replicas_) replica->set_training(training);
}

Trainer::Evaluation Trainer::evaluate(const std::vector<Batch>& batches) {
  const IntraOpThreads threads(options_.intra_op_threads);
  set_training(false);
  const MemoryWatch::Scope nobody(memory_, -1);
  Evaluation evaluation;
  std::vector<double> losses;
  for (const Batch& batch : batches) {
    // Replicas that are processes all see all of it.
    const StepResult result = pipeline_->eval(batch.args, kwargs_of(batch), batch.target, {.results_everywhere = true});
    for (const at::Tensor& loss : result.losses) losses.push_back(loss.item<double>());
    evaluation.outputs.push_back(result.output);
  }
  set_training(true);
  evaluation.loss = losses.empty() ? 0 : mean(losses);
  return evaluation;
}

Pipeline& Trainer::writing_pipeline() {
  set_training(false);
  // Shards are put together by the actions of their own pipeline.
  if (options_.sharded) return *pipeline_;
  if (writing_) return *writing_;
  const Schedule& schedule = pipeline_->schedule();
  Schedule forwards(schedule.placement(), schedule.graph(), /*microbatches=*/1);
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    forwards.add(schedule.placement().rank_of(stage), {.stage = stage, .microbatch = 0});
  }
  PipelineOptions options;
  options.transport = options_.transport;
  options.timeout = options_.timeout;
  options.intra_op_threads = options_.intra_op_threads;
  writing_ = std::make_unique<Pipeline>(build(*replicas_.front(), schedule, options_.transport.get(), memory_, 0),
                                        replicas_.front()->wiring(), forwards, std::move(options));
  return *writing_;
}

std::vector<Record> Trainer::records() {
  std::vector<Record> records(records_.begin(), records_.end());
  if (everyone_ == nullptr || records.empty()) return records;
  const Schedule& schedule = pipeline_->schedule();
  const auto rows = static_cast<std::int64_t>(records.size());
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const std::size_t count = schedule.actions(rank).size();
    const at::Tensor numbers = at::zeros({rows, static_cast<std::int64_t>(count), 5}, at::kLong);
    auto written = numbers.accessor<std::int64_t, 3>();
    for (std::int64_t i = 0; i < rows && options_.transport->rank() == rank; ++i) {
      const auto& own = records[static_cast<std::size_t>(i)][static_cast<std::size_t>(rank)];
      for (std::size_t at = 0; at < std::min(own.size(), count); ++at) {
        auto row = written[i][static_cast<std::int64_t>(at)];
        row[0] = own[at].start;
        row[1] = own[at].end;
        row[2] = own[at].waited;
        row[3] = own[at].bytes;
        row[4] = own[at].peer;
      }
    }
    finish([&] { return everyone_->broadcast({numbers}, rank); });
    for (std::int64_t i = 0; i < rows; ++i) {
      auto& own = records[static_cast<std::size_t>(i)][static_cast<std::size_t>(rank)];
      own.resize(count);
      for (std::size_t at = 0; at < count; ++at) {
        const auto row = written[i][static_cast<std::int64_t>(at)];
        own[at] = {.start = row[0], .end = row[1], .waited = row[2], .bytes = row[3], .peer = static_cast<int>(row[4])};
      }
    }
  }
  for (Record& record : records) record = with_common_clock(schedule, std::move(record));
  return records;
}

std::vector<RankMemory> Trainer::memory() {
  const Schedule& schedule = pipeline_->schedule();
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  const auto stages = static_cast<std::size_t>(schedule.stages());
  // By rank what it had, and then by stage its parameters with all that belongs to them, and what a microbatch keeps.
  std::vector<double> known(ranks + 2 * stages, 0);
  const std::span<double> most = std::span(known).first(ranks);
  const std::span<double> held = std::span(known).subspan(ranks, stages);
  const std::span<double> kept = std::span(known).subspan(ranks + stages);
  for (const Own& own : own_) {
    if (own.replica != 0) continue;
    const int rank = schedule.placement().rank_of(own.stage->stage_index());
    const auto stage = static_cast<std::size_t>(own.stage->stage_index());
    most[static_cast<std::size_t>(rank)] = memory_here(rank);
    kept[stage] = static_cast<double>(memory_.kept(own.stage->stage_index()));
    for (const auto& [name, parameter] : own.stage->parameters()) {
      held[stage] += 2.0 * static_cast<double>(parameter.nbytes());
    }
    for (const auto& [name, state] : own.optimizer.state()) held[stage] += static_cast<double>(state.nbytes());
  }
  std::ranges::copy(summed(known), known.begin());
  Costs costs;
  for (const double bytes : kept) costs.stages.push_back({.bytes_kept = bytes});
  const Timeline simulated = simulate(schedule, costs);
  std::vector<RankMemory> memory(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    double predicted = simulated.ranks[rank].peak_bytes;
    for (const int stage : schedule.placement().stages_of(static_cast<int>(rank))) {
      predicted += held[static_cast<std::size_t>(stage)];
    }
    memory[rank] = {.measured = static_cast<std::int64_t>(most[rank]),
                    .predicted = static_cast<std::int64_t>(predicted)};
  }
  return memory;
}

}  // namespace penstock
