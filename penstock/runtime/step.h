// Inputs and results of a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "penstock/tensor/microbatch.h"

namespace penstock {

// Computes the loss of a microbatch, a tensor of one element. It is called on the thread of the last stage's rank.
using LossFunction =
    std::function<at::Tensor(const c10::IValue& output, const c10::IValue& target, const Kwargs& loss_kwargs)>;

// Returns how much the loss of a microbatch counts: the number of rows or targets that it is the mean of. It is called
// on the caller's thread before the step begins, because the first backward needs the total over all microbatches.
using LossWeight = std::function<double(const c10::IValue& target, const Kwargs& loss_kwargs)>;

// Counts the rows of the target: the size of dimension 0 of its first tensor.
LossWeight count_rows();
// Counts the elements of the target that are not `ignore_index`, as cross_entropy does.
LossWeight count_targets(std::int64_t ignore_index = -100);

struct StepOptions {
  // Keyword arguments of later stages, by stage. They are split as those of the first stage are.
  std::map<int, Kwargs> stage_kwargs = {};
  Kwargs loss_kwargs = {};
  // Number of the step, from which random operators derive their generators. If unset, successful steps are counted.
  std::optional<std::int64_t> number = std::nullopt;
  // Factor of each microbatch's loss in the gradients, for one replica of this process after the other. If empty, it
  // follows from PipelineOptions::loss_weight, or is 1 / microbatches, or 1 without scale_grads. The loss of a
  // microbatch with factor 0 is not computed: it is reported as 0, and its gradients are zeros.
  std::vector<double> weights = {};
  // Weight of all microbatches that the gradients are the mean over, with PipelineOptions::loss_weight. In an
  // accumulation, give each step the sum over all of its steps. If unset, it is the weight of this step.
  std::optional<double> total_weight = std::nullopt;
  // Reduces gradients over replicas and shared parameters in this step. In an accumulation, set it in the last step
  // only.
  bool reduce = true;
  bool return_outputs = true;
  // Broadcasts the results to all processes of a replica. Those that receive them have them in CPU memory; the one that
  // has computed them keeps them on its device. Otherwise only the process of the last stage has outputs and losses, and
  // each process has its own loss terms.
  bool results_everywhere = false;
};

struct StepResult {
  // Output of the whole batch, merged from all microbatches; None without StepOptions::return_outputs.
  c10::IValue output = {};
  // Detached losses by microbatch, of one replica after the other; empty without a loss function.
  std::vector<at::Tensor> losses = {};
  // PipelineOptions::loss_weight of each of them; empty without it.
  std::vector<double> weights = {};
  // Terms that stages have added by add_loss, by microbatch, in the order of stages.
  std::vector<std::vector<at::Tensor>> loss_terms = {};

  // Returns the loss of the whole batch: the mean of `losses`, weighted by `weights` if there are any. Returns NaN if
  // all weights are 0. A process that is one of several replicas returns the loss of its own replica.
  double loss() const;
};

}  // namespace penstock
