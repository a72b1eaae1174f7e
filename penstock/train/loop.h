// The loop around a Trainer: steps until the run is done or somebody wants it to stop, evaluations and checkpoints between.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/train/trainer.h"

namespace penstock::internal {

struct LoopOptions {
  // 0: only at the end.
  std::int64_t eval_every = 0;
  // Whether evaluations have the outputs.
  bool eval_outputs = false;
  // Empty: none. Every so many steps, at the end, and when the run is stopped; 0 leaves out the first.
  std::string checkpoint;
  std::int64_t checkpoint_every = 0;
  int keep = 3;
  // For the checkpoints: CheckpointInfo::configuration.
  std::string configuration = "{}";
};

// What is told of it while it goes on; all may be left out.
struct LoopEvents {
  std::function<void(const StepReport& report)> stepped;
  // The loss of what is held out, and the outputs for it.
  std::function<void(std::int64_t step, const Trainer::Evaluation& evaluation)> evaluated;
  std::function<void(std::int64_t step, const std::string& path)> saved;
  // Called on all processes after the trial evaluation, before the first step. What it throws ends the run.
  std::function<void()> starting;
  // Called on all processes after the first step and before its `stepped`: what can fail at once has not failed.
  std::function<void()> begun;
  // Asked before every step. A code that is not 0 stops all processes after that step.
  std::function<int()> stop_code;
};

// Returns 0 when all `steps` have been done, or the code that the run was stopped with. Before the first step, one held-out
// batch is evaluated, so that what cannot be evaluated is an error then.
int train(Trainer& trainer, std::int64_t steps, const std::vector<Batch>& held_out, const LoopOptions& options,
          const LoopEvents& events);

}  // namespace penstock::internal
