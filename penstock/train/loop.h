// The training loop: steps until the run is complete or is asked to stop, with evaluations and checkpoints in between.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/train/trainer.h"

namespace penstock::internal {

struct LoopOptions {
  // Number of steps between evaluations; 0 evaluates only at the end.
  std::int64_t eval_every = 0;
  // If true, Trainer::Evaluation::outputs is filled in.
  bool eval_outputs = false;
  // Directory for checkpoints, which are written at the end of the run and when it is stopped. Empty disables them.
  std::string checkpoint;
  // Number of steps between further checkpoints; 0 for none.
  std::int64_t checkpoint_every = 0;
  // Number of checkpoints to keep.
  int keep = 3;
  // CheckpointInfo::configuration.
  std::string configuration = "{}";
};

// Callbacks of the loop, which it calls on its own thread. Each may be null.
struct LoopEvents {
  // Called after every step.
  std::function<void(const StepReport& report)> stepped;
  // Called after every evaluation of the held-out batches.
  std::function<void(std::int64_t step, const Trainer::Evaluation& evaluation)> evaluated;
  // Called when a checkpoint is complete on disk. On devices that is some steps after its own.
  std::function<void(std::int64_t step, const std::string& path)> saved;
  // Called on all processes after the trial evaluation and before the first step. An exception ends the run.
  std::function<void()> starting;
  // Called on all processes after the first step and before its `stepped`, when setup errors can be ruled out.
  std::function<void()> begun;
  // Called before every step. A nonzero code stops all processes after that step.
  std::function<int()> stop_code;
};

// Trains until `steps` are done, counted from the beginning of the run, and returns 0; or returns the stop code that
// ended it. One held-out batch is evaluated before the first step, so that a batch that cannot be evaluated is reported
// early. A checkpoint is complete before the next one begins, and before this returns. If a step fails while one is in
// flight, it is completed if the processes still can. Throws what the members of Trainer throw.
int train(Trainer& trainer, std::int64_t steps, const std::vector<Batch>& held_out, const LoopOptions& options,
          const LoopEvents& events);

}  // namespace penstock::internal
