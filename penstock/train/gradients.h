// Gradients between the backward passes of a step and its optimizers: their norm, clipping and removal.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

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

  // Returns the sum of squares of each gradient, indexed as Model::parameter_names. Parameters whose gradients are in
  // other processes have 0, so the sum over all processes is that of the whole model. Sparse gradients become dense.
  std::vector<double> squares();
  // Multiplies all gradients by max_norm / norm if the norm is larger. A max_norm of 0 leaves them as they are.
  void clip(double norm, double max_norm);
  // Removes all gradients, including those that earlier batches of the step have accumulated.
  void discard();
  // Returns the stage of each parameter, indexed as Model::parameter_names. A collective: all processes call it.
  std::vector<int> stages_of_parameters(const TrainingProcesses& processes) const;

 private:
  TrainedStages& stages_;
  std::size_t parameter_count_;
  // Index in Model::parameter_names of each parameter, by stage and parameter of the stage. None for parameters that
  // are counted in another stage or replica.
  std::vector<std::vector<std::optional<std::size_t>>> positions_;
};

}  // namespace penstock::internal
