// Trains a model step by step: runs batches through a pipeline, clips gradients, steps the optimizers, and saves
// checkpoints.
//
//   Trainer trainer(std::move(replicas), data, schedule, {.steps = 1000});
//   while (trainer.steps_done() < 1000) std::cout << trainer.step().loss << "\n";
//
// The parts of a step are types of their own: StepBatches reads and weighs the batches, StepStatistics sums what the
// processes have measured, NonFinitePolicy decides about NaN, Gradients clips, TrainedStages steps the optimizers, and
// StageCheckpoints saves and loads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/device/device_list.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/data.h"
#include "penstock/train/device_numbers.h"
#include "penstock/train/grad_scaler.h"
#include "penstock/train/gradients.h"
#include "penstock/train/memory_watch.h"
#include "penstock/train/model.h"
#include "penstock/train/nonfinite.h"
#include "penstock/train/optimizer.h"
#include "penstock/train/rank_memory.h"
#include "penstock/train/stage_checkpoints.h"
#include "penstock/train/step_batches.h"
#include "penstock/train/step_records.h"
#include "penstock/train/step_statistics.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

struct TrainerOptions {
  // Transport of this process rank. If null, all ranks run as threads of this process.
  std::shared_ptr<Transport> transport = nullptr;
  // Devices, which are dealt to the ranks of this process: those of the first replica, then those of the second.
  DeviceList devices = {};
  // Number of steps of the whole run, which the learning-rate schedule depends on.
  std::int64_t steps = 1000;
  OptimizerOptions optimizer = {};
  LearningRate learning_rate = {};
  // Number of batches per step. Their gradients are accumulated.
  int accumulate = 1;
  // Maximum norm of all gradients; 0 disables clipping. The norm is summed in float64 over the parameters in the
  // model's order, so it does not depend on how the model is cut into stages.
  double clip = 1;
  // Scales the loss in the backward, as float16 needs it. A step whose gradients overflow is skipped.
  std::optional<GradScalerOptions> grad_scaler = std::nullopt;
  OnNonFinite on_nonfinite = OnNonFinite::Stop;
  // Maximum number of steps that may be skipped in a row. The next one makes step() throw NonFiniteError.
  int max_skipped = 10;
  // If true, each replica stores a shard of each parameter and of its optimizer state.
  bool sharded = false;
  // Seed for dropout and other random operators.
  std::uint64_t seed = 0;
  // Number of threads that each rank's operators use.
  int intra_op_threads = 1;
  // Longest time that a rank waits for another one.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// Returns the stages of one replica whose ranks are in this process, ascending: all without a transport.
std::vector<int> local_stages(const Schedule& schedule, const Transport* transport);

// Owns the models, the pipeline and the optimizers of this process. Each process of a run has one Trainer, and all call
// the same members in the same order; those that are marked as collective wait for the other processes. One thread at a
// time calls a Trainer. During a call, operators of the calling thread use TrainerOptions::intra_op_threads.
class Trainer {
 public:
  // `replicas` are the models of this process's replicas: all of them with thread ranks, one with process ranks. `data`
  // outlives the trainer. Throws what Pipeline's constructor throws.
  Trainer(std::vector<std::unique_ptr<Model>> replicas, const Data& data, const Schedule& schedule,
          TrainerOptions options);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  std::int64_t steps_done() const { return steps_done_; }
  // Runs one training step. A nonzero stop code asks all processes to stop after the step, and reaches them in
  // StepReport::stop_code. Throws PipelineError, DataError and NonFiniteError, after which the trainer is as it was
  // before the step. A collective.
  StepReport step(int stop_code = 0);

  struct Evaluation {
    // Mean loss, weighted by Data::loss_weight. NaN if the total weight is 0.
    double loss = 0;
    // Reason why the loss is not finite, a sentence; empty if it is finite.
    std::string nonfinite;
    // Total weight: the sum of Data::loss_weight.
    double weight = 0;
    // Output of each batch in host memory, if requested.
    std::vector<c10::IValue> outputs;
  };
  // Runs forwards only, in evaluation mode. The outputs of microbatches are merged only if they are requested, because
  // the output of a model that returns its loss cannot be merged. Throws PipelineError and DataError. A collective.
  Evaluation evaluate(const std::vector<Batch>& batches, bool return_outputs = false);
  // Throws NonFiniteError for an evaluation that is not finite, unless on_nonfinite is Skip.
  void require_finite(const Evaluation& evaluation) const { nonfinite_.require_finite(evaluation.nonfinite); }

  // Begins a checkpoint of the current step in `directory`; the last `keep` of the run remain. `configuration` is a JSON
  // object. On devices it is copied and written beside the steps and evaluations that follow. At most one is in flight:
  // call finish_save() before the next one, and on the CPU before the next step.
  void start_save(const std::string& directory, int keep, const std::string& configuration);
  // True if steps may follow while a checkpoint is in flight: on devices.
  bool saves_beside_steps() const { return !options_.devices.is_cpu(); }
  // Advances the checkpoint in flight, if there is one, without waiting for files. Call it after each step. Returns the
  // checkpoint when it is on disk. Throws CheckpointError on all processes when one of them cannot write its part, or
  // has a parameter that is not finite. A collective.
  std::optional<SavedCheckpoint> poll_save() { return checkpoints_.poll(); }
  // Blocks until the checkpoint in flight, if there is one, is on disk. Throws as poll_save(). A collective.
  std::optional<SavedCheckpoint> finish_save() { return checkpoints_.finish(); }
  // Completes the checkpoint in flight as far as that is possible after an exception that other processes may not have
  // thrown. Returns the checkpoint if it is on disk.
  std::optional<SavedCheckpoint> finish_save_after_failure() { return checkpoints_.finish_after_failure(); }
  // Writes a checkpoint, and returns its path when it is on disk. There must be none in flight. A collective.
  std::string save(const std::string& directory, int keep, const std::string& configuration);
  // Returns the estimated size of a checkpoint. A collective.
  std::int64_t checkpoint_bytes() const { return checkpoints_.estimate_bytes(options_.optimizer); }
  // Resumes from a checkpoint, of a run on any device. Throws CheckpointError, after which the trainer is as it was
  // before.
  void load(const Checkpoint& checkpoint);

  // True on the process that prints progress and writes shared files (rank 0).
  bool is_coordinator() const { return processes_.is_coordinator(); }
  // Returns the measured and predicted peak memory of the first replica's ranks. A collective.
  std::vector<RankMemory> memory() const;
  // Returns the cost model of the first replica: times and links of `records`, as records() returns them, if there are
  // any, and the measured sizes of its stages. A collective.
  Costs costs(const std::vector<Record>& records) const;
  // Returns the sizes of the first replica's stages, indexed by stage. A collective.
  std::vector<StageSize> stage_sizes() const { return stages_.sizes(processes_); }
  // Returns the records of the last steps, at most kRecords, oldest first. Each is that of the last batch of its step,
  // for all ranks of the first replica on one clock. A collective.
  static constexpr std::size_t kRecords = 16;
  std::vector<Record> records() const { return records_.gather(pipeline_->schedule(), processes_); }

  Pipeline& pipeline() { return *pipeline_; }
  // Returns a forward-only pipeline for a few rows at a time, such as for text generation: with the same parameters, as
  // few microbatches as possible, and the model in evaluation mode. A collective.
  Pipeline& generation_pipeline();
  const Model& model() const { return *replicas_.front(); }

 private:
  std::unique_ptr<Pipeline> build_pipeline(const Schedule& schedule);
  void set_training(bool training);
  // Runs the batches of a step and the collectives after them, and fills in the report.
  void run_batches(const StepBatches& batches, int stop_code, StepReport& report);
  // Runs one batch of a step. Its losses are written to the statistics when `numbers` are read.
  void run_batch(const StepBatches& batches, std::size_t index, StepStatistics& statistics, DeviceNumbers& numbers);
  // Decides about a step whose loss or gradients are not finite, and writes the reason of the skip to the report.
  void skip_or_stop(const StepBatches& batches, const StepStatistics& statistics, StepReport& report);
  // True if the gradients of a step have overflowed because of the loss scale.
  bool has_overflowed(const StepReport& report) const;
  // Counts skipped steps, and updates the loss scale.
  void finish_skipping(const StepReport& report);
  // Returns the rows of this process's replica. With thread ranks the pipeline itself splits the batch.
  Batch local_part(const Batch& batch) const;

  std::vector<std::unique_ptr<Model>> replicas_;
  const Data& data_;
  TrainerOptions options_;
  std::int64_t steps_done_ = 0;
  // CheckpointInfo::run.
  std::string run_;
  MemoryWatch memory_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<Pipeline> generation_;
  TrainingProcesses processes_;
  TrainedStages stages_;
  Gradients gradients_;
  StageCheckpoints checkpoints_;
  NonFinitePolicy nonfinite_;
  std::optional<GradScaler> scaler_;
  StepRecords records_{kRecords};
};

}  // namespace penstock::internal
