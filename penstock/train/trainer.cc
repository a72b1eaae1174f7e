#include "penstock/train/trainer.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <limits>
#include <utility>

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/device/host_copies.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

constexpr const char* kNoTargets = ": there is no target that counts: all of them are ignored.";

std::string scale_text(double scale) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", scale);
  return text.data();
}

Kwargs kwargs_of(const Batch& batch) {
  const auto found = batch.kwargs.find(0);
  return found == batch.kwargs.end() ? Kwargs() : found->second;
}

}  // namespace

std::vector<int> local_stages(const Schedule& schedule, const Transport* transport) {
  std::vector<int> stages;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    const int rank = schedule.placement().rank_of(stage);
    if (transport == nullptr || rank == transport->rank() % schedule.ranks()) stages.push_back(stage);
  }
  return stages;
}

Trainer::Trainer(std::vector<std::unique_ptr<Model>> replicas, const Data& data, const Schedule& schedule,
                 TrainerOptions options)
    : replicas_(std::move(replicas)),
      data_(data),
      options_(std::move(options)),
      run_(new_run_id()),
      memory_(schedule, static_cast<int>(replicas_.size())),
      pipeline_(build_pipeline(schedule)),
      processes_(options_.transport, schedule.ranks(), static_cast<int>(replicas_.size()), options_.timeout,
                 steps_done_),
      stages_(*pipeline_, options_.optimizer, processes_, memory_, options_.intra_op_threads),
      gradients_(stages_, *replicas_.front()),
      checkpoints_(pipeline_->schedule(), *replicas_.front(), stages_, processes_, memory_, options_.sharded),
      nonfinite_(options_.on_nonfinite, options_.max_skipped) {
  if (options_.grad_scaler) scaler_.emplace(*options_.grad_scaler);
}

Trainer::~Trainer() = default;

std::unique_ptr<Pipeline> Trainer::build_pipeline(const Schedule& schedule) {
  const IntraOpThreads threads(options_.intra_op_threads);
  std::vector<StagedModel> models;
  for (std::size_t replica = 0; replica < replicas_.size(); ++replica) {
    const Model& model = *replicas_[replica];
    std::vector<PipelineStage> stages;
    for (const int stage : local_stages(schedule, options_.transport.get())) {
      const int rank = schedule.placement().rank_of(stage);
      const int local_rank = options_.transport == nullptr ? static_cast<int>(replica) * schedule.ranks() + rank : 0;
      const at::Device device = options_.devices.of(local_rank);
      memory_.set_device(rank, static_cast<int>(replica), device);
      const MemoryWatch::Scope scope(memory_, rank, static_cast<int>(replica));
      stages.push_back(model.build_stage(stage, device));
    }
    models.emplace_back(std::move(stages), model.wiring(), model.shared_parameters());
  }
  PipelineOptions options;
  options.transport = options_.transport;
  options.loss = [this](const c10::IValue& output, const c10::IValue& target, const Kwargs&) {
    return memory_.measure_loss(output, [&] { return data_.loss(output, target); });
  };
  options.sharded = options_.sharded;
  options.timeout = options_.timeout;
  options.intra_op_threads = options_.intra_op_threads;
  options.seed = options_.seed;
  memory_.watch(options.functions);
  return std::make_unique<Pipeline>(std::move(models), schedule, std::move(options));
}

StepReport Trainer::step(int stop_code) {
  const auto start = Clock::now();
  const IntraOpThreads threads(options_.intra_op_threads);
  // Tensors that are allocated here may be freed by a rank, and belong to none.
  const MemoryWatch::Scope no_rank(memory_, -1);
  checkpoints_.block_forwards();
  StepReport report{.step = steps_done_ + 1};
  SavedState buffers = stages_.save_written_tensors();
  try {
    StepBatches batches = read_step_batches(data_, steps_done_ * options_.accumulate, options_.accumulate,
                                            processes_.replicas(), pipeline_->schedule().microbatches());
    if (!options_.devices.is_cpu()) {
      for (Batch& batch : batches.batches) batch = pinned_batch(std::move(batch));
    }
    for (const Batch& batch : batches.batches) report.size += data_.size_of(batch);
    if (batches.weight == 0) {
      report.has_targets = false;
      report.loss = report.gradient_norm = std::numeric_limits<double>::quiet_NaN();
      report.skipped = concat("step ", report.step, batches.names(), kNoTargets);
      nonfinite_.require_skippable(report.skipped, "check which target is ignored, or skip such steps.");
    } else {
      run_batches(batches, stop_code, report);
    }
  } catch (...) {
    gradients_.discard();
    buffers.restore();
    throw;
  }
  report.learning_rate = options_.learning_rate.at(steps_done_, options_.steps);
  if (scaler_) report.loss_scale = scaler_->scale();
  if (report.skipped.empty()) {
    gradients_.clip(report.gradient_norm, options_.clip, scaler_ ? scaler_->unscale() : 1);
    checkpoints_.block_updates();
    stages_.step_optimizers(report.learning_rate);
  } else {
    gradients_.discard();
    buffers.restore();
  }
  finish_skipping(report);
  ++steps_done_;
  report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return report;
}

void Trainer::run_batches(const StepBatches& batches, int stop_code, StepReport& report) {
  const Schedule& schedule = pipeline_->schedule();
  const std::size_t losses = batches.batches.size() * static_cast<std::size_t>(processes_.replicas()) *
                             static_cast<std::size_t>(schedule.microbatches());
  StepStatistics statistics{.losses = std::vector<double>(losses, 0),
                            .stop_codes = std::vector<double>(static_cast<std::size_t>(processes_.count()), 0),
                            .memory = std::vector<double>(static_cast<std::size_t>(schedule.ranks()), 0)};
  DeviceNumbers numbers;
  for (std::size_t i = 0; i < batches.batches.size(); ++i) run_batch(batches, i, statistics, numbers);
  gradients_.compute_squares(numbers);
  // On devices, this is where the step waits, and what follows finds them idle.
  numbers.read(options_.timeout);
  if (!options_.devices.is_cpu()) statistics.add_time(*pipeline_);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    if (!processes_.has_rank(rank)) continue;
    statistics.memory[static_cast<std::size_t>(rank)] = static_cast<double>(memory_.peak(rank));
  }
  Record record = pipeline_->record();
  memory_.add_to(record);
  records_.add(std::move(record));
  statistics.gradient_squares = gradients_.squares();
  statistics.stop_codes[static_cast<std::size_t>(processes_.index())] = stop_code;
  statistics.sum_over(processes_);
  statistics.write_to(report, batches, scaler_ ? scaler_->unscale() : 1);
  if (!std::isfinite(report.loss) || !std::isfinite(report.gradient_norm)) skip_or_stop(batches, statistics, report);
}

void Trainer::skip_or_stop(const StepBatches& batches, const StepStatistics& statistics, StepReport& report) {
  const Schedule& schedule = pipeline_->schedule();
  if (has_overflowed(report)) {
    report.skipped = concat("step ", report.step, batches.names(),
                            ": the gradients overflow float16 at a loss scale of ", scale_text(scaler_->scale()), ".");
    return;
  }
  report.skipped = nonfinite_step_text(report.step, schedule, processes_.replicas(), batches, statistics,
                                       model().parameter_names(), gradients_.stages_of_parameters(processes_));
  nonfinite_.require_skippable(
      report.skipped, "look at the data, lower the learning rate, lower the clipping norm, or skip such steps.");
}

bool Trainer::has_overflowed(const StepReport& report) const {
  return scaler_ && scaler_->scale() > 1 && std::isfinite(report.loss) && !std::isfinite(report.gradient_norm);
}

void Trainer::finish_skipping(const StepReport& report) {
  const bool is_skipped = !report.skipped.empty();
  // An overflow is part of finding the scale, and no failure.
  if (!has_overflowed(report)) nonfinite_.count(is_skipped);
  // All processes have the same norm. A step without targets has no gradients.
  if (scaler_ && report.has_targets) scaler_->update(!std::isfinite(report.gradient_norm));
}

void Trainer::run_batch(const StepBatches& batches, std::size_t index, StepStatistics& statistics,
                        DeviceNumbers& numbers) {
  const auto microbatches = static_cast<std::size_t>(pipeline_->schedule().microbatches());
  const auto replicas = static_cast<std::size_t>(processes_.replicas());
  const std::size_t first_here = static_cast<std::size_t>(processes_.first_replica()) * microbatches;
  const std::vector<MicrobatchShare>& shares = batches.shares[index];
  StepOptions step;
  step.number = steps_done_ * options_.accumulate + static_cast<std::int64_t>(index);
  // The gradients are those of the mean over all batches of the step. The pipeline averages them over replicas, so the
  // weights are multiplied by the number of replicas.
  const double factor = static_cast<double>(replicas) * (scaler_ ? scaler_->scale() : 1);
  for (std::size_t i = 0; i < microbatches * replicas_.size(); ++i) {
    step.weights.push_back(shares[first_here + i].weight * factor / batches.weight);
  }
  step.reduce = index + 1 == batches.batches.size();
  step.return_outputs = false;
  const Batch batch = local_part(batches.batches[index]);
  memory_.begin_batch();
  const StepResult result = run_named(batches.batches[index], shares, pipeline_->schedule().microbatches(), [&] {
    return pipeline_->step(batch.args, kwargs_of(batch), batch.target, step);
  });
  const std::size_t first = index * replicas * microbatches + first_here;
  for (std::size_t i = 0; i < result.losses.size(); ++i) numbers.add(result.losses[i], &statistics.losses[first + i]);
  if (options_.devices.is_cpu()) statistics.add_time(*pipeline_);
}

Batch Trainer::local_part(const Batch& batch) const {
  if (processes_.are_threads() || processes_.replicas() == 1) return batch;
  return split_batch(batch, {}, processes_.replicas(),
                     "replicas")[static_cast<std::size_t>(processes_.first_replica())];
}

void Trainer::set_training(bool training) {
  for (const auto& replica : replicas_) replica->set_training(training);
}

Trainer::Evaluation Trainer::evaluate(const std::vector<Batch>& batches, bool return_outputs) {
  const IntraOpThreads threads(options_.intra_op_threads);
  // A model that was exported for evaluation cannot be switched to training.
  const bool was_training = model().is_training();
  set_training(false);
  const auto restore_training = c10::make_scope_exit([this, was_training] {
    if (was_training) set_training(true);
  });
  const MemoryWatch::Scope no_rank(memory_, -1);
  checkpoints_.block_forwards();
  const Schedule& schedule = pipeline_->schedule();
  Evaluation evaluation;
  DeviceNumbers numbers;
  HostCopies copies;
  std::vector<std::vector<MicrobatchShare>> shares_of_batches;
  std::vector<std::vector<double>> losses(batches.size());
  for (std::size_t index = 0; index < batches.size(); ++index) {
    const Batch batch = options_.devices.is_cpu() ? batches[index] : pinned_batch(batches[index]);
    // Thread replicas share a batch; with process ranks every replica evaluates all of it.
    const std::vector<MicrobatchShare>& shares =
        shares_of_batches.emplace_back(microbatch_shares(data_, batch, pipeline_->replicas(), schedule.microbatches()));
    StepOptions step;
    step.return_outputs = return_outputs;
    step.results_everywhere = true;
    // A loss with weight 0 is not computed.
    for (const MicrobatchShare& share : shares) step.weights.push_back(share.weight);
    const StepResult result = run_named(batch, shares, schedule.microbatches(), [&] {
      return pipeline_->eval(batch.args, kwargs_of(batch), batch.target, step);
    });
    losses[index].resize(result.losses.size());
    for (std::size_t i = 0; i < result.losses.size(); ++i) numbers.add(result.losses[i], &losses[index][i]);
    if (!return_outputs) continue;
    evaluation.outputs.push_back(map_leaves(result.output, [&](const c10::IValue& leaf) {
      return leaf.isTensor() ? c10::IValue(copies.start(leaf.toTensor())) : leaf;
    }));
  }
  numbers.read(options_.timeout);
  if (!copies.wait(deadline_after(options_.timeout))) {
    throw PipelineError("a device has not sent the outputs of the evaluation within the timeout.");
  }
  double sum = 0;
  for (std::size_t index = 0; index < batches.size(); ++index) {
    const std::vector<MicrobatchShare>& shares = shares_of_batches[index];
    for (std::size_t i = 0; i < losses[index].size(); ++i) {
      sum += shares[i].weight * losses[index][i];
      evaluation.weight += shares[i].weight;
      if (!evaluation.nonfinite.empty()) continue;
      evaluation.nonfinite =
          nonfinite_loss_text(schedule, processes_.replicas(), batches[index].name, i, shares[i], losses[index][i]);
    }
  }
  evaluation.loss = sum / evaluation.weight;
  if (evaluation.weight == 0) evaluation.nonfinite = kNoTargets;
  if (evaluation.nonfinite.empty()) return evaluation;
  evaluation.nonfinite.insert(0, concat("the evaluation after step ", steps_done_));
  return evaluation;
}

void Trainer::start_save(const std::string& directory, int keep, const std::string& configuration) {
  checkpoints_.start(directory, keep,
                     {.step = steps_done_,
                      .run = run_,
                      .configuration = configuration,
                      .grad_scaler = scaler_ ? std::optional(scaler_->state()) : std::nullopt});
}

std::string Trainer::save(const std::string& directory, int keep, const std::string& configuration) {
  start_save(directory, keep, configuration);
  return finish_save()->path;
}

void Trainer::load(const Checkpoint& checkpoint) {
  checkpoints_.load(checkpoint);
  if (scaler_ && checkpoint.info().grad_scaler) scaler_->load(*checkpoint.info().grad_scaler);
  run_ = checkpoint.info().run;
  steps_done_ = checkpoint.info().step;
}

Pipeline& Trainer::generation_pipeline() {
  set_training(false);
  // Shards are gathered by the actions of the pipeline that they belong to.
  if (options_.sharded) return *pipeline_;
  if (generation_) return *generation_;
  const Schedule& schedule = pipeline_->schedule();
  Schedule forwards(schedule.placement(), schedule.graph(), /*microbatches=*/1);
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    forwards.add(schedule.placement().rank_of(stage), {.stage = stage, .microbatch = 0});
  }
  PipelineOptions options;
  options.transport = options_.transport;
  options.timeout = options_.timeout;
  options.intra_op_threads = options_.intra_op_threads;
  // These stages share the trained parameters; Model::build_stage would create new ones.
  std::vector<PipelineStage> stages;
  for (const PipelineStage& stage : pipeline_->stages()) {
    stages.emplace_back(stage.module(), stage.stage_index(), schedule.stages(), StageOptions{.device = stage.device()});
  }
  // Forwards make no gradients, so no shared parameters are named.
  generation_ =
      std::make_unique<Pipeline>(StagedModel(std::move(stages), model().wiring()), forwards, std::move(options));
  return *generation_;
}

std::vector<RankMemory> Trainer::memory() const {
  return memory_of_ranks(pipeline_->schedule(), costs({}), stages_, memory_, processes_);
}

Costs Trainer::costs(const std::vector<Record>& records) const {
  Costs costs = records.empty() ? Costs() : costs_of(pipeline_->schedule(), records);
  add_sizes(costs, pipeline_->schedule(), stages_, memory_, processes_,
            {.last = records_.last(),
             .optimizer = options_.optimizer,
             .sharded = options_.sharded,
             .accumulates = options_.accumulate > 1});
  return costs;
}

}  // namespace penstock::internal
