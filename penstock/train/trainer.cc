#include "penstock/train/trainer.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "penstock/runtime/error.h"
#include "penstock/schedule/simulate.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {
namespace {

// Returns the model with the stages of this process.
StagedModel build(const Model& model, const Schedule& schedule, const Transport* transport, MemoryWatch& memory,
                  int replica) {
  std::vector<PipelineStage> stages;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int rank = schedule.placement().rank_of(stage);
    if (transport != nullptr && rank != transport->rank() % schedule.ranks()) continue;
    const MemoryWatch::Scope scope(memory, rank, replica);
    stages.push_back(model.build_stage(stage));
  }
  return {std::move(stages), model.wiring(), model.shared_parameters()};
}

Kwargs kwargs_of(const Batch& batch) {
  const auto found = batch.kwargs.find(0);
  return found == batch.kwargs.end() ? Kwargs() : found->second;
}

// Bytes of the largest message with activations of a stage.
double bytes_sent(const Schedule& schedule, const Record& record, int stage) {
  const int rank = schedule.placement().rank_of(stage);
  const auto actions = schedule.actions(rank);
  const std::vector<ActionRecord>& recorded = record[static_cast<std::size_t>(rank)];
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < recorded.size(); ++i) {
    const bool is_sent = actions[i].computation == Computation::SendForward && actions[i].stage == stage;
    if (is_sent) bytes = std::max(bytes, recorded[i].bytes);
  }
  return static_cast<double>(bytes);
}

}  // namespace

Trainer::Trainer(std::vector<std::unique_ptr<Model>> replicas, const Data& data, const Schedule& schedule,
                 TrainerOptions options)
    : replicas_(std::move(replicas)),
      data_(data),
      options_(std::move(options)),
      memory_(schedule.ranks(), schedule.stages(), static_cast<int>(replicas_.size())),
      names_(replicas_.front()->parameter_names()),
      run_(new_run_id()) {
  const IntraOpThreads threads(options_.intra_op_threads);
  std::vector<StagedModel> models;
  for (std::size_t replica = 0; replica < replicas_.size(); ++replica) {
    models.push_back(
        build(*replicas_[replica], schedule, options_.transport.get(), memory_, static_cast<int>(replica)));
  }
  PipelineOptions pipeline_options;
  pipeline_options.transport = options_.transport;
  pipeline_options.loss = [this](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    return data_.loss(output, target);
  };
  pipeline_options.sharded = options_.sharded;
  pipeline_options.timeout = options_.timeout;
  pipeline_options.intra_op_threads = options_.intra_op_threads;
  pipeline_options.seed = options_.seed;
  memory_.watch(pipeline_options.functions);
  pipeline_ = std::make_unique<Pipeline>(std::move(models), schedule, std::move(pipeline_options));
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
                      .positions = positions_in(stage, replica_of(local))});
      // Those of an exported model were read before there were ranks.
      const int rank = schedule.placement().rank_of(stage.stage_index());
      for (const auto* tensors : {&stage.parameters(), &stage.module().parameters, &stage.module().buffers}) {
        for (const auto& [name, tensor] : *tensors) memory_.adopt(tensor, rank, static_cast<int>(local));
      }
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
    if (error.why() == TransportError::Why::Timeout) {
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

StepReport Trainer::step(int stop_code) {
  const auto began = Clock::now();
  const IntraOpThreads threads(options_.intra_op_threads);
  // Ranks let go of what is made here.
  const MemoryWatch::Scope nobody(memory_, -1);
  StepReport report{.step = steps_done_ + 1};
  SavedState buffers = saved_buffers();
  try {
    const StepBatches batches = batches_of_step();
    for (const Batch& batch : batches.batches) report.size += data_.size_of(batch);
    if (batches.weight == 0) {
      report.loss = report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
      report.skipped = "step " + std::to_string(report.step) + batches.names() +
                       ": there is no target that counts: all of them are ignored.";
      require_skippable(report.skipped, "see --ignore-index, or let --on-nonfinite skip leave out such steps.");
    } else {
      run(batches, stop_code, report);
    }
  } catch (...) {
    drop_gradients();
    buffers.restore();
    throw;
  }
  report.learning_rate = options_.learning_rate.at(steps_done_, options_.steps);
  if (report.skipped.empty()) {
    skipped_in_a_row_ = 0;
    if (options_.clip > 0 && report.gradient_norm > options_.clip) {
      scale_gradients(options_.clip / report.gradient_norm);
    }
    for_each_own([&](Own& own) {
      const int stage = own.stage->stage_index();
      memory_.measure_update(stage, pipeline_->schedule().placement().rank_of(stage),
                             options_.transport == nullptr ? own.replica : 0,
                             [&] { own.optimizer.step(report.learning_rate); });
    });
  } else {
    ++skipped_in_a_row_;
    drop_gradients();
    buffers.restore();
  }
  ++steps_done_;
  report.seconds = std::chrono::duration<double>(Clock::now() - began).count();
  return report;
}

void Trainer::run(const StepBatches& batches, int stop_code, StepReport& report) {
  Figures figures = run_batches(batches);
  figures.squares = squares_of_gradients();
  const auto process = options_.transport == nullptr ? 0 : static_cast<std::size_t>(options_.transport->rank());
  figures.stop_codes[process] = stop_code;
  sum_up(figures);
  double sum = 0;
  std::size_t next = 0;
  for (const std::vector<Share>& shares : batches.shares) {
    for (const Share& share : shares) sum += share.weight * figures.losses[next++];
  }
  report.loss = sum / batches.weight;
  report.gradient_norm = std::sqrt(std::accumulate(figures.squares.begin(), figures.squares.end(), 0.0));
  report.bubble = figures.whole > 0 ? 1 - figures.computed / figures.whole : 0;
  const auto stop = std::ranges::find_if(figures.stop_codes, [](double code) { return code != 0; });
  if (stop != figures.stop_codes.end()) report.stop_code = static_cast<int>(*stop);
  for (const double bytes : figures.memory) report.memory.push_back(static_cast<std::int64_t>(bytes));
  if (std::isfinite(report.loss) && std::isfinite(report.gradient_norm)) return;
  report.skipped = nonfinite_in(batches, figures);
  require_skippable(
      report.skipped,
      "look at the data, lower --learning-rate or --clip, or let --on-nonfinite skip leave out such steps.");
}

void Trainer::require_skippable(const std::string& why, const std::string& hint) const {
  if (options_.on_nonfinite == OnNonFinite::Stop) throw NonFiniteError(why + "\n  Hint: " + hint);
  if (skipped_in_a_row_ < options_.max_skipped) return;
  throw NonFiniteError(why + "\n  The " + std::to_string(skipped_in_a_row_) +
                       " steps before it were skipped for the like.\n  Hint: --max-skipped lets more be skipped in a "
                       "row.");
}

std::vector<Trainer::Share> Trainer::shares_of(const Batch& batch, int replicas) const {
  std::vector<Share> shares;
  try {
    std::vector<Batch> parts{batch};
    if (replicas > 1) parts = split_batch(batch, {}, replicas, "replicas");
    std::int64_t row = 0;
    for (const Batch& part : parts) {
      for (const Batch& microbatch : split_batch(part, {}, pipeline_->schedule().microbatches(), "microbatches")) {
        const std::int64_t rows = rows_of(microbatch);
        shares.push_back({.weight = data_.loss_weight(microbatch), .first_row = row, .rows = rows});
        row += rows;
      }
    }
  } catch (const std::exception& error) {
    throw DataError((batch.name.empty() ? "" : batch.name + ": ") + reason_of(error));
  }
  return shares;
}

StepResult Trainer::on_batch(const Batch& batch, const std::vector<Share>& shares,
                             const std::function<StepResult()>& act) const {
  try {
    return act();
  } catch (const PipelineError& error) {
    if (batch.name.empty() || !error.place()) throw;
    const auto microbatches = static_cast<std::size_t>(pipeline_->schedule().microbatches());
    // An evaluation is of the whole batch in each replica that is a process.
    const std::size_t index = static_cast<std::size_t>(error.place()->replica) * microbatches +
                              static_cast<std::size_t>(error.place()->microbatch);
    const Share& share = shares[index % shares.size()];
    const std::string last = std::to_string(share.first_row + share.rows - 1);
    throw PipelineError(batch.name + ", rows " + std::to_string(share.first_row) + " to " + last + ": " + error.what(),
                        error.place());
  }
}

std::string Trainer::StepBatches::names() const {
  std::string names;
  for (const Batch& batch : batches) {
    if (!batch.name.empty()) names += ", " + batch.name;
  }
  return names;
}

Trainer::StepBatches Trainer::batches_of_step() const {
  StepBatches step;
  for (int part = 0; part < options_.accumulate; ++part) {
    const Batch& batch = step.batches.emplace_back(data_.batch(steps_done_ * options_.accumulate + part));
    for (const Share& share : step.shares.emplace_back(shares_of(batch, num_replicas_))) step.weight += share.weight;
  }
  return step;
}

Trainer::Figures Trainer::run_batches(const StepBatches& batches) {
  const Schedule& schedule = pipeline_->schedule();
  const auto microbatches = static_cast<std::size_t>(schedule.microbatches());
  const auto replicas = static_cast<std::size_t>(num_replicas_);
  const std::size_t count = batches.batches.size();
  Figures figures{.losses = std::vector<double>(count * replicas * microbatches, 0),
                  .stop_codes = std::vector<double>(
                      options_.transport == nullptr ? 1 : static_cast<std::size_t>(options_.transport->ranks()), 0),
                  .memory = std::vector<double>(static_cast<std::size_t>(schedule.ranks()), 0)};
  for (std::size_t part = 0; part < count; ++part) {
    const std::vector<Share>& shares = batches.shares[part];
    const std::size_t first_here = static_cast<std::size_t>(replica_of(0)) * microbatches;
    StepOptions step;
    step.number = steps_done_ * options_.accumulate + static_cast<std::int64_t>(part);
    // Gradients are those of the mean over all batches of the step, and averaged over replicas.
    for (std::size_t i = 0; i < microbatches * replicas_.size(); ++i) {
      step.weights.push_back(shares[first_here + i].weight * static_cast<double>(replicas) / batches.weight);
    }
    step.reduce = part == count - 1;
    step.return_outputs = false;
    const Batch batch = own_part(batches.batches[part]);
    const StepResult result = on_batch(batches.batches[part], shares, [&] {
      return pipeline_->step(batch.args, kwargs_of(batch), batch.target, step);
    });
    const std::size_t first = part * replicas * microbatches + first_here;
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
  for (double& square : figures.squares) places.push_back(&square);
  for (double& bytes : figures.memory) places.push_back(&bytes);
  for (double& code : figures.stop_codes) places.push_back(&code);
  for (double* one : {&figures.computed, &figures.whole}) places.push_back(one);
  sum_in_place(places);
}

void Trainer::sum_in_place(const std::vector<double*>& places) {
  std::vector<double> numbers;
  for (const double* place : places) numbers.push_back(*place);
  numbers = summed(std::move(numbers));
  for (std::size_t i = 0; i < places.size(); ++i) *places[i] = numbers[i];
}

double Trainer::memory_here(int rank) const {
  return static_cast<double>(memory_.most(rank));
}

void Trainer::set_training(bool training) {
  for (const auto& replica : replicas_) replica->set_training(training);
}

Trainer::Evaluation Trainer::evaluate(const std::vector<Batch>& batches, bool return_outputs) {
  const IntraOpThreads threads(options_.intra_op_threads);
  // A model that was exported for evaluation cannot be switched to training.
  const bool was_training = model().is_training();
  set_training(false);
  // Also after an error.
  const auto training_again = c10::make_scope_exit([this, was_training] {
    if (was_training) set_training(true);
  });
  const MemoryWatch::Scope nobody(memory_, -1);
  Evaluation evaluation;
  double sum = 0;
  for (const Batch& batch : batches) {
    // Replicas that are processes all see all of it.
    const std::vector<Share> shares = shares_of(batch, pipeline_->replicas());
    StepOptions step;
    step.return_outputs = return_outputs;
    step.results_everywhere = true;
    // A loss that counts nothing is not computed.
    for (const Share& share : shares) step.weights.push_back(share.weight);
    const StepResult result =
        on_batch(batch, shares, [&] { return pipeline_->eval(batch.args, kwargs_of(batch), batch.target, step); });
    for (std::size_t i = 0; i < result.losses.size(); ++i) {
      const auto loss = result.losses[i].item<double>();
      sum += shares[i].weight * loss;
      evaluation.weight += shares[i].weight;
      if (evaluation.nonfinite.empty()) evaluation.nonfinite = nonfinite_loss(batch.name, i, shares[i], loss);
    }
    if (return_outputs) evaluation.outputs.push_back(result.output);
  }
  evaluation.loss = sum / evaluation.weight;
  if (evaluation.weight == 0) evaluation.nonfinite = ": there is no target that counts: all of them are ignored.";
  if (evaluation.nonfinite.empty()) return evaluation;
  evaluation.nonfinite.insert(0, "the evaluation after step " + std::to_string(steps_done_));
  return evaluation;
}

void Trainer::require_finite(const Evaluation& evaluation) const {
  if (evaluation.nonfinite.empty() || options_.on_nonfinite == OnNonFinite::Skip) return;
  throw NonFiniteError(evaluation.nonfinite + "\n  Hint: look at the data and the weights.");
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
  // The stages share the parameters that are trained; a model would build new ones.
  std::vector<PipelineStage> stages;
  for (const PipelineStage& stage : pipeline_->stages()) {
    stages.emplace_back(stage.module(), stage.stage_index(), schedule.stages());
  }
  // Forwards make no gradients, so no shared parameters are named.
  writing_ = std::make_unique<Pipeline>(StagedModel(std::move(stages), replicas_.front()->wiring()), forwards,
                                        std::move(options));
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
  std::vector<double> most(ranks, 0);
  std::vector<StageMemory> stages(static_cast<std::size_t>(schedule.stages()));
  for (const Own& own : own_) {
    if (own.replica != 0) continue;
    const int index = own.stage->stage_index();
    const int rank = schedule.placement().rank_of(index);
    most[static_cast<std::size_t>(rank)] = memory_here(rank);
    StageMemory& stage = stages[static_cast<std::size_t>(index)];
    stage.kept = static_cast<double>(memory_.kept(index));
    stage.working_forward = static_cast<double>(memory_.working_forward(index));
    stage.working_backward = static_cast<double>(memory_.working_backward(index));
    stage.working_update = static_cast<double>(memory_.working_update(index));
    if (!records_.empty()) stage.sent = bytes_sent(schedule, records_.back(), index);
    for (const auto& [name, parameter] : own.stage->parameters()) {
      stage.held += static_cast<double>(parameter.nbytes());
      if (parameter.requires_grad()) stage.gradients += static_cast<double>(parameter.nbytes());
    }
    for (const auto& [name, state] : own.optimizer.state()) stage.held += static_cast<double>(state.nbytes());
    if (!options_.sharded || num_replicas_ == 1) continue;
    for (const auto& [name, parameter] : own.stage->module().parameters) {
      stage.unsharded += static_cast<double>(parameter.nbytes());
    }
  }
  // What each process knows of its own.
  std::vector<double*> places;
  for (double& bytes : most) places.push_back(&bytes);
  for (StageMemory& stage : stages) {
    for (double* place : {&stage.held, &stage.gradients, &stage.unsharded, &stage.kept, &stage.working_forward,
                          &stage.working_backward, &stage.working_update, &stage.sent}) {
      places.push_back(place);
    }
  }
  sum_in_place(places);
  std::vector<RankMemory> memory(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const double predicted =
        predicted_bytes(schedule, static_cast<int>(rank), stages, /*between_processes=*/options_.transport != nullptr);
    memory[rank] = {.measured = static_cast<std::int64_t>(most[rank]),
                    .predicted = static_cast<std::int64_t>(predicted)};
  }
  return memory;
}

}  // namespace penstock::internal
