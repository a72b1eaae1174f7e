// A Pipeline is a model in stages with a schedule, ready to run: it owns the ranks of this process, which are threads.
//
//   Pipeline pipeline(std::move(stages), lower(generate("1F1B", {.ranks = 4, .microbatches = 8})), {.loss = mse});
//   StepResult result = pipeline.step({x}, {}, y);   // forwards and backwards: gradients are in the parameters
//   optimizer.step();
//   StepResult seen = pipeline.eval({x});            // forwards only, without gradients
#pragma once

#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/runtime/record.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"

namespace penstock {

// A step that cannot begin, or that failed. The message names the rank, the stage, the action and the microbatch, what
// went wrong there, and where the other ranks were.
class PipelineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct PipelineOptions {
  LossFunction loss = nullptr;
  // How arguments and targets are split into microbatches and outputs merged; left out: along dimension 0.
  std::optional<c10::IValue> args_spec = std::nullopt;
  std::optional<c10::IValue> kwargs_spec = std::nullopt;
  std::map<int, c10::IValue> stage_kwargs_specs = {};
  std::optional<c10::IValue> target_spec = std::nullopt;
  std::optional<c10::IValue> output_merge_spec = std::nullopt;
  // Each microbatch's loss counts 1 / microbatches, or 1.
  bool scale_grads = true;
  // How long a rank waits for another before the step fails.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  // Threads of each rank's own operators.
  int intra_op_threads = 1;
  // Of the random numbers that stages draw: each forward has its own, by step, microbatch and stage.
  std::uint64_t seed = 0;
};

class Pipeline {
 public:
  // All stages, in order, and a schedule for them, which is lowered unless it has messages already. A wiring other than
  // a chain names the outputs that stages take. Throws ScheduleError, StageError and PipelineError when these do not fit.
  Pipeline(std::vector<PipelineStage> stages, const Schedule& schedule, PipelineOptions options = {});
  Pipeline(std::vector<PipelineStage> stages, const Wiring& wiring, const Schedule& schedule,
           PipelineOptions options = {});
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  // Forwards and backwards of a batch. `args` and `kwargs` are the first stage's. Throws ChunkError for what cannot be
  // split, and PipelineError, after which nothing of the step is left but gradients that had been accumulated.
  StepResult step(const Args& args, const Kwargs& kwargs = {}, const c10::IValue& target = {},
                  const StepOptions& options = {});
  // Forwards alone, without gradients; with a target also the losses.
  StepResult eval(const Args& args, const Kwargs& kwargs = {}, const c10::IValue& target = {},
                  const StepOptions& options = {});

  // The lowered schedule; in eval it is run without its backwards.
  const Schedule& schedule() const;
  const std::vector<PipelineStage>& stages() const;
  // What ran last, with the schedule that it followed.
  const Record& record() const;
  const Schedule& recorded_schedule() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace penstock
