// A Pipeline runs a model in stages by a schedule. It owns the ranks of this process: all of them, each on a thread of
// its own, or the one process rank that this process is.
//
//   const Schedule schedule = generate("1F1B", {.ranks = 4, .microbatches = 8});
//   Pipeline pipeline(std::move(stages), schedule, {.loss = mse});
//   StepResult result = pipeline.step({x}, {}, y);   // forwards and backwards: gradients are in the parameters
//   optimizer.step();
//   module->eval();                                  // dropout and batch normalisation; Pipeline::eval does not switch
//   StepResult evaluated = pipeline.eval({x});       // forwards only, without gradients
//
// With process ranks, each process passes the stages that the schedule places on it:
//
//   const Rendezvous place = rendezvous();           // from the environment, as torchrun sets it
//   Pipeline pipeline(std::move(local_stages), schedule, {.transport = c10d_transport(place), .loss = mse});
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/runtime/actions.h"
#include "penstock/runtime/batch.h"
#include "penstock/runtime/error.h"
#include "penstock/runtime/record.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/transport/transport.h"

namespace penstock {

struct PipelineOptions {
  // Transport of this process rank. If null, all ranks run as threads of this process.
  std::shared_ptr<Transport> transport = nullptr;
  LossFunction loss = nullptr;
  // Weight of each microbatch's loss. Gradients are those of sum(weight * loss) / sum(weight) over all microbatches and
  // replicas, which is the mean over the whole batch if `loss` is a mean and the weight counts what it is the mean of.
  // Set it on all processes or on none. If null, all microbatches count alike, as in torch.distributed.pipelining.
  LossWeight loss_weight = nullptr;
  // Specs for splitting the batch and for merging outputs. If unset, both are done along dimension 0.
  BatchSpecs specs = {};
  std::optional<c10::IValue> output_merge_spec = std::nullopt;
  // Gradients are those of the mean over microbatches if true, and of the sum if false.
  bool scale_grads = true;
  // Shards parameters: each replica keeps a part of each stage's parameters, not all of them.
  bool sharded = false;
  // Functions that run around actions or in place of them.
  ActionFunctions functions = {};
  // Computes gradients by autograd in step(). Set it to false if overrides of the backwards compute them.
  bool backward_requires_autograd = true;
  // Time that a rank waits for another one before the step fails.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // Number of threads for the operators of each rank.
  int intra_op_threads = 1;
  // Seed for dropout and other random operators. Each forward derives its generator from (seed, step, microbatch,
  // stage).
  std::uint64_t seed = 0;
};

// One thread at a time calls step() and eval(); any thread may call cancel() meanwhile. Pipelines that have a parameter
// in common must not step at the same time. Between calls the caller owns the parameters and their gradients.
//
// If the process exits (std::exit, or the return of main) while a pipeline is alive, its threads end before the static
// objects of libtorch are destroyed. A step that another thread is in is cancelled. That thread is held in step(),
// which throws after ten seconds if the exiting thread waits for it. An action that does not return within five seconds
// is not waited for, and may crash the process.
class Pipeline {
 public:
  // Takes all stages of the model, in order, and a schedule for them, which is lowered unless it has messages already.
  // Each of several process ranks passes the stages that the schedule places on it, and all construct their pipelines
  // at the same time. Throws ScheduleError, StageError and PipelineError if model and schedule do not fit together or
  // the processes disagree, and TransportError if a process does not take part within the timeout. If it throws,
  // parameters and buffers have not changed.
  Pipeline(StagedModel model, const Schedule& schedule, PipelineOptions options = {});
  // Takes several replicas of one model, which have the same wiring and shared parameters. Each runs its part of the
  // batch, and gradients are averaged over them. Parameters and buffers of the first replica are copied to the others.
  // Process ranks pass one model: there are as many replicas as the number of processes is a multiple of the schedule's
  // ranks, and each process passes the batch of its own replica.
  Pipeline(std::vector<StagedModel> replicas, const Schedule& schedule, PipelineOptions options = {});
  // Waits for the actions of a cancelled step, and rolls it back.
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Runs the forwards and backwards of a batch, and adds gradients to .grad of the parameters. `args` and `kwargs` are
  // those of the first stage. A process rank needs only what its own stages take, and the target only with the last
  // stage. The target of a loss of the output alone is at::Tensor(). Throws ChunkError for a value that cannot be split
  // or merged, and PipelineError.
  //
  // A failed step is rolled back: gradients of parameters and of the batch's tensors have their values from before, in
  // the same tensors, and so have buffers. It is not counted, so the next step draws the same random numbers.
  StepResult step(const Args& args, const Kwargs& kwargs = {}, const c10::IValue& target = {},
                  const StepOptions& options = {});
  // Runs the forwards alone, without gradients, and computes losses if there is a target. Modules keep their mode, as
  // in torch.distributed.pipelining: in training mode dropout is active and batch normalisation updates its statistics.
  // Call module->eval(), or Pipe::eval() for an exported model, before it, and train() after it.
  StepResult eval(const Args& args, const Kwargs& kwargs = {}, const c10::IValue& target = {},
                  const StepOptions& options = {});

  // Ends the step or evaluation that another thread is in, at any point of it: that call throws PipelineError at once,
  // even if an action does not return. The next step or evaluation waits for such an action and rolls the step back;
  // until then, do not touch gradients and buffers. Without a step in flight it does nothing.
  void cancel();

  // Returns the lowered schedule. eval() runs it without its backwards.
  const Schedule& schedule() const;
  // Returns the stages of this process.
  const std::vector<PipelineStage>& stages(int replica = 0) const;
  // Returns the number of replicas in this process, which share a batch.
  int replicas() const;
  // Return the record of the last step or evaluation, and the schedule that it ran. The lists of other processes' ranks
  // are empty. On devices, record() waits until they have ended the step, at most for the timeout; actions that they have
  // not ended have the host's times.
  const Record& record(int replica = 0) const;
  const Schedule& recorded_schedule() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock
