// What one process computes for the microbatches of a step: the measure of every pipeline.
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

// The loss of an output about which nothing is known: the sum of the means of its floating-point tensors.
at::Tensor sum_of_means(const c10::IValue& output);

struct WholeRunOptions {
  // Of a microbatch's output.
  std::function<at::Tensor(const c10::IValue& output)> loss = sum_of_means;
  // Of operators: their number changes how sums are rounded.
  int intra_op_threads = 1;
  // See RandomScope.
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  // Asked before each microbatch: once it returns true, the run ends with what it has.
  std::function<bool()> is_cancelled = [] { return false; };
};

struct WholeRun {
  // By microbatch. Detached.
  std::vector<c10::IValue> outputs;
  std::vector<at::Tensor> losses;
  // By the model's own names, dense; without those of parameters that got none.
  TensorsByName gradients;
  // Largest absolute element that one microbatch contributed to each of them: the scale at which they were rounded.
  std::map<std::string, double> largest_contributions;
};

// Runs the program on one microbatch after the other, in this thread, with the backward of loss / microbatches; and adds
// up the gradients of each stage's parameters in the order in which the schedule computes them there. What has a gradient
// already keeps it as it is, and so do the arguments, although a program may write to them.
WholeRun run_whole(const Pipe& pipe, const Schedule& schedule, std::span<const Arguments> microbatches,
                   const WholeRunOptions& options);

}  // namespace penstock::internal
