// A Pipeline is a model in stages with a schedule, ready to run: it owns the ranks of this process, which are threads,
// or the one rank that this process is.
//
//   Pipeline pipeline(std::move(stages), lower(generate("1F1B", {.ranks = 4, .microbatches = 8})), {.loss = mse});
//   StepResult result = pipeline.step({x}, {}, y);   // forwards and backwards: gradients are in the parameters
//   optimizer.step();
//   module->eval();                                  // dropout and batch normalisation: eval below leaves them alone
//   StepResult seen = pipeline.eval({x});            // forwards only, without gradients
//
// The same in each of several processes, which have a part of the stages each:
//
//   const Rendezvous place = rendezvous();           // from the environment, as torchrun sets it
//   Pipeline pipeline(std::move(own_stages), schedule, {.transport = c10d_transport(place), .loss = mse});
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/runtime/batch.h"
#include "penstock/runtime/error.h"
#include "penstock/runtime/executor.h"
#include "penstock/runtime/record.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/transport/transport.h"

namespace penstock {

struct PipelineOptions {
  // This process's end, when its rank is one of several processes; left out: all ranks are threads of this process.
  std::shared_ptr<Transport> transport = nullptr;
  LossFunction loss = nullptr;
  // How much the loss of each microbatch counts: gradients are those of sum(weight * loss) / sum(weight) over all
  // microbatches and replicas, which is the mean over the whole batch when `loss` is a mean and this counts what it is the
  // mean of. All processes give one, or none does. Left out: all microbatches count alike, as in
  // torch.distributed.pipelining.
  LossWeight loss_weight = nullptr;
  // How the batch is split into microbatches, and outputs are merged; left out: along dimension 0.
  BatchSpecs specs = {};
  std::optional<c10::IValue> output_merge_spec = std::nullopt;
  // Gradients are those of the mean over microbatches, or else of the sum.
  bool scale_grads = true;
  // Each replica keeps a part of each stage's parameters, instead of all.
  bool sharded = false;
  // In place of what a kind of action does, and around each.
  ActionFunctions functions = {};
  // Whether step computes gradients by autograd; without it, functions for the backwards do it.
  bool backward_requires_autograd = true;
  // How long a rank waits for another before the step fails.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // Threads of each rank's own operators.
  int intra_op_threads = 1;
  // Of the random numbers that stages draw: each forward has its own, by step, microbatch and stage.
  std::uint64_t seed = 0;
};

// When the process exits (std::exit, or the return of main) while a pipeline is alive, its threads end before libtorch's
// static objects are destroyed. A step that another thread is in at that time is abandoned and does not return, unless
// something at exit waits for that thread: then it throws after ten seconds. An action that does not return within five
// seconds is not waited for, and may then crash the process.
class Pipeline {
 public:
  // Takes all stages of the model, in order, and a schedule for them, which is lowered unless it has messages already.
  // Each of several process ranks passes the stages that the schedule places on it, and all construct their pipelines at
  // the same time. Throws ScheduleError, StageError and PipelineError if model and schedule do not fit together or the
  // processes disagree, and TransportError if a process does not take part within the timeout.
  Pipeline(StagedModel model, const Schedule& schedule, PipelineOptions options = {});
  // Takes several replicas of one model, which have the same wiring and shared parameters. Each runs its part of the
  // batch, and gradients are averaged over them. Parameters and buffers of the first replica are copied to the others.
  // Process ranks pass one model: there are as many replicas as the number of processes is a multiple of the schedule's
  // ranks, and each process passes the batch of its own replica.
  Pipeline(std::vector<StagedModel> replicas, const Schedule& schedule, PipelineOptions options = {});
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Forwards and backwards of a batch. `args` and `kwargs` are the first stage's; a process needs only what its own stages
  // take, and the target only with the last. For a loss of the output alone, the target is at::Tensor(). Throws ChunkError for what cannot be split or merged, and PipelineError. Nothing
  // of a step that failed is left: gradients of parameters and of the batch's tensors have the values from before, in the
  // same tensors, and buffers have their values. So has the number of the next step, and with it random numbers.
  StepResult step(const Args& args, const Kwargs& kwargs = {}, const c10::IValue& target = {},
                  const StepOptions& options = {});
  // Forwards alone, without gradients; with a target also the losses. Modules stay in the mode in which they are, as in
  // torch.distributed.pipelining: in training mode dropout drops and batch normalisation learns. Call module->eval(), or
  // Pipe::eval() for an exported model, before it, and train() after it.
  StepResult eval(const Args& args, const Kwargs& kwargs = {}, const c10::IValue& target = {},
                  const StepOptions& options = {});

  // Ends a step or an evaluation that another thread is in, at whatever point of it: it throws PipelineError at once,
  // although an action that does not return goes on. The next step or evaluation waits for it, and puts gradients back to what they were: until then
  // they are not to be touched. The destructor waits too.
  void abandon();

  // The lowered schedule; in eval it is run without its backwards.
  const Schedule& schedule() const;
  // Those of this process.
  const std::vector<PipelineStage>& stages(int replica = 0) const;
  // How many replicas of this process share out a batch.
  int replicas() const;
  // What ran last, with the schedule that it followed. Of other processes' ranks there is nothing.
  const Record& record(int replica = 0) const;
  const Schedule& recorded_schedule() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock
