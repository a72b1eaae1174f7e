// Statistics of a training step: what each process measures, and what the trainer reports of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/runtime/pipeline.h"
#include "penstock/train/step_batches.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

struct StepReport {
  // Number of completed steps, this one included.
  std::int64_t step = 0;
  // Mean loss of the step's batches, weighted by Data::loss_weight, before the optimizer step.
  double loss = 0;
  double learning_rate = 0;
  // Norm of all gradients before clipping.
  double gradient_norm = 0;
  // Factor of the loss in the backward, of float16.
  std::optional<double> loss_scale = std::nullopt;
  // Reason why the step was skipped, a sentence; empty if it was not.
  std::string skipped = {};
  // False if no target of the step counts, so that there are no gradients.
  bool has_targets = true;
  // Sum of Data::size_of over the step's batches.
  std::int64_t size = 0;
  double seconds = 0;
  // Fraction of the pipeline's time in which ranks did not compute; on devices, in the last batch of the step.
  double bubble = 0;
  // Peak memory of each rank of the first replica so far, in bytes.
  std::vector<std::int64_t> memory = {};
  // Stop code of the lowest process that asked all processes to stop after this step; 0 if none did.
  int stop_code = 0;
};

// Numbers of one step. Each process fills in what it has measured and leaves the rest 0; sum_over() adds them up.
struct StepStatistics {
  // Indexed by batch, replica and microbatch.
  std::vector<double> losses;
  // Sum of squares of each gradient, indexed as Model::parameter_names.
  std::vector<double> gradient_squares = {};
  // Milliseconds that ranks have computed, and that the pipeline ran, summed over ranks.
  double compute_time = 0;
  double total_time = 0;
  // Indexed by process.
  std::vector<double> stop_codes;
  // Peak memory in bytes, indexed by rank of the first replica.
  std::vector<double> memory;

  // Adds the time of the batch that the pipeline ran last.
  void add_time(const Pipeline& pipeline);
  // Sums all numbers over the processes.
  void sum_over(const TrainingProcesses& processes);
  // Writes loss, norm, bubble, memory and stop code to a report. `unscale` is the factor of gradients that undoes a loss
  // scale. Call it after sum_over.
  void write_to(StepReport& report, const StepBatches& batches, double unscale = 1) const;
};

}  // namespace penstock::internal
