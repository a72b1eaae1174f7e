// The reference run: what one process computes for the microbatches of a step. A pipeline has to give the same.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "penstock/program/inputs.h"
#include "penstock/program/pipe.h"
#include "penstock/schedule/schedule.h"

namespace penstock::internal {

// Returns the default loss for an output of unknown meaning: the sum of the means of its floating-point tensors.
at::Tensor sum_of_means(const c10::IValue& output);

struct ReferenceRunOptions {
  // Loss of a microbatch.
  std::function<at::Tensor(const c10::IValue& output)> loss = sum_of_means;
  // Number of threads that an operator uses. It affects the rounding of sums.
  int intra_op_threads = 1;
  // Seed and step of the random numbers: see RandomScope.
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  // Device that the program runs on, with copies of its weights there unless it is the CPU. Results are on the CPU.
  at::Device device = at::kCPU;
  // Called before each microbatch. When it returns true, the run ends with the results so far.
  std::function<bool()> is_cancelled = [] { return false; };
};

struct ReferenceRun {
  // Outputs and losses by microbatch, detached.
  std::vector<c10::IValue> outputs;
  std::vector<at::Tensor> losses;
  // Dense gradients by the model's names. Parameters without gradient are missing.
  TensorsByName gradients;
  // Largest absolute element that a microbatch contributed to each gradient, which is the scale of its rounding errors.
  std::map<std::string, double> largest_contributions;
};

// Runs the program on one microbatch after the other, in this thread, with the backward of loss / microbatches. Sums
// the gradients of each parameter in the order in which the schedule computes them in the parameter's first stage.
// Existing gradients and the arguments are unchanged, even if the program writes to its arguments.
ReferenceRun run_reference(const Pipe& pipe, const Schedule& schedule, std::span<const Arguments> microbatches,
                           const ReferenceRunOptions& options);

}  // namespace penstock::internal
