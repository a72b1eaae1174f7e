// A Trainer makes a model better, step by step: batches through the pipeline, gradients clipped, the optimizer, and now
// and then a checkpoint. On several processes each has one, and all call the same.
//
//   Trainer trainer(std::move(replicas), data, schedule, {.steps = 1000});
//   while (trainer.steps_done() < 1000) std::cout << trainer.step().loss << "\n";
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/stage/saved_state.h"
#include "penstock/train/checkpoint.h"
#include "penstock/train/data.h"
#include "penstock/train/memory.h"
#include "penstock/train/model.h"
#include "penstock/train/optimizer.h"

namespace penstock::internal {

// What is done at a loss, or a norm of all gradients, that is NaN or infinite. In both cases parameters, optimizers and
// buffers are as they were before the step.
enum class OnNonFinite {
  // step throws NonFiniteError.
  Stop,
  // The step is counted, and changes nothing.
  Skip,
};

// The message names the step, its batches, the microbatch or the parameter, and the stage.
class NonFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct TrainerOptions {
  // This process's end, when its rank is one of several processes; left out: all ranks are threads.
  std::shared_ptr<Transport> transport = nullptr;
  // Of the whole run; the learning rate goes by it.
  std::int64_t steps = 1000;
  OptimizerOptions optimizer = {};
  LearningRate learning_rate = {};
  // Batches a step: their gradients add up.
  int accumulate = 1;
  // The most that the norm of all gradients may be; 0 for any. It is that of float64 sums over the parameters in the
  // model's order, so it does not depend on the cut.
  double clip = 1;
  OnNonFinite on_nonfinite = OnNonFinite::Stop;
  // Number of steps that may be skipped in a row; at the next, step throws NonFiniteError.
  int max_skipped = 10;
  // Replicas keep a part of each parameter, instead of all.
  bool sharded = false;
  std::uint64_t seed = 0;
  int intra_op_threads = 1;
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

struct StepReport {
  // How many have been done with this one.
  std::int64_t step = 0;
  // The mean over all that the batches of the step count (Data::loss_weight), of what the model was before the step.
  double loss = 0;
  double learning_rate = 0;
  // The norm of all gradients before they were clipped.
  double gradient_norm = 0;
  // Why the step was skipped, in a sentence; empty if it was not.
  std::string skipped = {};
  // Data::size_of.
  std::int64_t size = 0;
  double seconds = 0;
  // The part of the ranks' time in which they did not compute, while the pipeline ran.
  double bubble = 0;
  // Bytes of each rank of the first replica, at most so far.
  std::vector<std::int64_t> memory = {};
  // The stop code of the lowest rank that asked all processes to stop after this step; 0 if none did.
  int stop_code = 0;
};

struct StageSize {
  // Number of parameters, and of their elements without shards.
  std::int64_t parameters = 0;
  std::int64_t elements = 0;
};

class Trainer {
 public:
  // The models of the replicas of this process: all on threads, one on a process. `data` outlives it. While a
  // call lasts, operators of the caller use intra_op_threads, as those of ranks do.
  Trainer(std::vector<std::unique_ptr<Model>> replicas, const Data& data, const Schedule& schedule,
          TrainerOptions options);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  std::int64_t steps_done() const { return steps_done_; }
  // Throws PipelineError, DataError and NonFiniteError, after which the trainer is as it was before the step. A stop code
  // that is not 0 asks all processes to stop after the step: it reaches them in StepReport::stop_code.
  StepReport step(int stop_code = 0);

  struct Evaluation {
    // The mean over all that the batches count; NaN if nothing counts.
    double loss = 0;
    // Why the loss is not finite, in a sentence; empty if it is finite.
    std::string nonfinite;
    // How much that is: the sum of Data::loss_weight.
    double weight = 0;
    // The output of each batch, if asked for.
    std::vector<c10::IValue> outputs;
  };
  // Runs forwards alone, in evaluation mode. The outputs of microbatches are merged only if they are asked for: a model that
  // gives its loss has nothing to merge. Throws PipelineError and DataError.
  Evaluation evaluate(const std::vector<Batch>& batches, bool return_outputs = false);
  // Throws NonFiniteError for an evaluation that is not finite, unless the options skip what is not.
  void require_finite(const Evaluation& evaluation) const;

  // Writes a checkpoint into `folder`, of which the last `keep` stay, and says where it is. Throws CheckpointError on all
  // processes when one of them cannot write its part, or has a parameter that is not finite.
  std::string save(const std::string& folder, int keep, const std::string& configuration);
  // Size of a checkpoint, estimated from parameters, buffers and what the optimizer will remember. All processes ask.
  std::int64_t checkpoint_bytes();
  // Goes on from there. Throws CheckpointError, and is as it was before.
  void load(const Checkpoint& checkpoint);

  // Whether it is for this process to speak: to print, and to write what is written once.
  bool speaks() const;
  // What the ranks of the first replica have had in memory, and what the schedule promised. All processes ask.
  std::vector<RankMemory> memory();
  // Sizes of the stages of the first replica, by stage. All processes ask.
  std::vector<StageSize> stage_sizes();
  // Returns what ran in the last steps, at most kRecords of them, the oldest first: the last batch of each, by the
  // pipeline's schedule, on all ranks of the first replica, and on one clock. All processes ask.
  static constexpr std::size_t kRecords = 16;
  std::vector<Record> records();

  Pipeline& pipeline() { return *pipeline_; }
  // For a few rows at a time, as when a text is written: with as few microbatches as can be, and the model put into
  // evaluation mode. All processes ask.
  Pipeline& writing_pipeline();
  const Model& model() const { return *replicas_.front(); }

 private:
  struct Own {
    int replica = 0;
    const PipelineStage* stage = nullptr;
    Optimizer optimizer;
    // By parameter of the stage: where it stands among those of the model, none if it counts elsewhere, and the sum of its
    // gradient's squares.
    std::vector<std::optional<std::size_t>> positions = {};
    std::vector<double> squares = {};
  };

  // A microbatch's part of a batch: its rows, and how much its loss counts.
  struct Share {
    double weight = 0;
    std::int64_t first_row = 0;
    std::int64_t rows = 0;
  };

  // The batches of a step, with the microbatches of each, of one replica after the other.
  struct StepBatches {
    std::vector<Batch> batches;
    std::vector<std::vector<Share>> shares;
    double weight = 0;

    // Returns ", a.safetensors, b.safetensors" of batches that have names.
    std::string names() const;
  };

  // What the processes tell one another of a step.
  struct Figures {
    // By batch, replica and microbatch.
    std::vector<double> losses;
    // By parameter of the model: the sum of its gradient's squares.
    std::vector<double> squares = {};
    // How long ranks computed, and how long they could have.
    double computed = 0;
    double whole = 0;
    // By process.
    std::vector<double> stop_codes;
    // By rank of the first replica.
    std::vector<double> memory;
  };

  // Whether dropout drops in what is run next.
  void set_training(bool training);
  std::int64_t replica_of(std::size_t local) const;
  StepBatches batches_of_step() const;
  // Runs batches that count, and reports of them.
  void run(const StepBatches& batches, int stop_code, StepReport& report);
  // Throws NonFiniteError unless a step may be skipped.
  void require_skippable(const std::string& why, const std::string& hint) const;
  // The batches of a step through the pipeline.
  Figures run_batches(const StepBatches& batches);
  void sum_up(Figures& figures);
  double memory_here(int rank) const;
  // Something that all processes do between the pipeline's steps. Throws PipelineError, with who is missing.
  void finish(const std::function<std::unique_ptr<Work>()>& begin) const;
  // What all processes know: numbers that each of them has added to what others have left at 0.
  std::vector<double> summed(std::vector<double> numbers);
  void sum_in_place(const std::vector<double*>& places);
  Batch own_part(const Batch& batch) const;
  // The microbatches of a batch that is split into `replicas` and then into microbatches, as the pipeline does it. Throws
  // DataError, which names the batch, for one that cannot be split.
  std::vector<Share> shares_of(const Batch& batch, int replicas) const;
  // Runs `act`, a step or an evaluation of a batch, and adds the batch and the rows of the microbatch to what it throws.
  StepResult on_batch(const Batch& batch, const std::vector<Share>& shares,
                      const std::function<StepResult()>& act) const;
  // Calls act(own) for all that this process has, each rank's on a thread of its own.
  void for_each_own(const std::function<void(Own& own)>& act);
  // The sum of squares of each gradient of this process, by parameter of the model.
  std::vector<double> squares_of_gradients();
  void scale_gradients(double factor);
  void drop_gradients();
  // Returns where a loss that is not finite comes from, as the rest of a sentence; empty if it is finite or does not count.
  // `name` is the batch's, `index` the microbatch's in the batch.
  std::string nonfinite_loss(const std::string& name, std::size_t index, const Share& share, double loss) const;
  // What is not finite in a step, in a sentence; empty if all is.
  std::string nonfinite_in(const StepBatches& batches, const Figures& figures);
  // The stage of each parameter of the model. All processes ask.
  std::vector<int> stages_of_parameters();
  // Returns a copy of all buffers: batch normalisation changes its own without counting their version up.
  SavedState saved_buffers() const;
  // Throws CheckpointError, which names the first parameter of this process that is not finite.
  void require_finite_parameters(const std::string& path) const;
  std::vector<std::optional<std::size_t>> positions_in(const PipelineStage& stage, std::int64_t replica) const;
  NamedTensors whole(const Own& own, const NamedTensors& tensors);
  at::Tensor part_for(const Own& own, const std::string& name, const at::Tensor& whole_tensor) const;

  std::vector<std::unique_ptr<Model>> replicas_;
  const Data& data_;
  TrainerOptions options_;
  MemoryWatch memory_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<Pipeline> writing_;
  int num_replicas_ = 1;
  std::vector<Own> own_;
  std::vector<std::string> names_;
  // All processes, and those that have the same stages; none between threads.
  std::shared_ptr<Group> everyone_;
  std::shared_ptr<Group> peers_;
  // CheckpointInfo::run.
  std::string run_;
  std::int64_t steps_done_ = 0;
  std::deque<Record> records_;
  int skipped_in_a_row_ = 0;
};

}  // namespace penstock::internal
