// Gradients between the backward passes of a step and its optimizers: their norm, clipping and removal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "penstock/train/device_numbers.h"
#include "penstock/train/model.h"
#include "penstock/train/trained_stages.h"
#include "penstock/train/training_processes.h"

namespace penstock::internal {

// Returns the sum of squares in float64, added in an order that depends on the number of elements alone.
double sum_of_squares(const at::Tensor& tensor);

class Gradients {
 public:
  // `stages` outlives this.
  Gradients(TrainedStages& stages, const Model& model);

  // Computes the sum of squares of each gradient. Those on devices are added to `numbers`, and squares() returns them
  // when these have been read. Sparse gradients become dense.
  void compute_squares(DeviceNumbers& numbers);
  // Returns the sums, indexed as Model::parameter_names. Parameters whose gradients are in other processes have 0, so the
  // sum over all processes is that of the whole model.
  std::vector<double> squares() const;
  // Multiplies all gradients by `factor` and, if their norm would then be larger than max_norm, by max_norm / norm. A
  // max_norm of 0 leaves them unclipped.
  void clip(double norm, double max_norm, double factor = 1);
  // Removes all gradients, including those that earlier batches of the step have accumulated.
  void discard();
  // Returns the stage of each parameter, indexed as Model::parameter_names. A collective: all processes call it.
  std::vector<int> stages_of_parameters(const TrainingProcesses& processes) const;

 private:
  TrainedStages& stages_;
  std::size_t parameter_count_;
  // Sum of squares of each gradient, or its norm if it is on a device, indexed by stage and parameter of the stage.
  std::vector<std::vector<double>> squares_or_norms_;
  // Index in Model::parameter_names of each parameter, by stage and parameter of the stage. None for parameters that
  // are counted in another stage or replica.
  std::vector<std::vector<std::optional<std::size_t>>> positions_;
};

}  // namespace penstock::internal
