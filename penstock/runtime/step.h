// What goes into a step and comes out of it.
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

// The loss of a microbatch: a tensor of one element.
using LossFunction =
    std::function<at::Tensor(const c10::IValue& output, const c10::IValue& target, const Kwargs& loss_kwargs)>;

// Returns how much the loss of a microbatch counts: the number of rows or targets that it is the mean of. It is called on
// the caller's thread before the step begins, because the first backward needs the total over all microbatches.
using LossWeight = std::function<double(const c10::IValue& target, const Kwargs& loss_kwargs)>;

// Counts the rows of the target: the size of dimension 0 of its first tensor.
LossWeight count_rows();
// Counts the elements of the target that are not `ignore_index`, as cross_entropy does.
LossWeight count_targets(std::int64_t ignore_index = -100);

struct StepOptions {
  // Keyword arguments of later stages, by stage. They are split as those of the first are.
  std::map<int, Kwargs> stage_kwargs = {};
  Kwargs loss_kwargs = {};
  // Which step it is, for the random numbers that stages draw; left out: they are counted.
  std::optional<std::int64_t> number = std::nullopt;
  // The factor of each microbatch's loss in the gradients, for one replica of this process after the other; left out:
  // what PipelineOptions::loss_weight gives, or 1 / microbatches, or 1 without scale_grads. The loss of a microbatch whose
  // factor is 0 is not computed: it is reported as 0, and its gradients are zeros.
  std::vector<double> weights = {};
  // With PipelineOptions::loss_weight: the weight of all microbatches that the gradients are to be the mean of. An
  // accumulation over several steps gives each of them the sum over all of them; left out: that of this step.
  std::optional<double> total_weight = std::nullopt;
  // Gradients are reduced over replicas and shared parameters in this step. Of an accumulation, only the last one does.
  bool reduce = true;
  bool return_outputs = true;
  // Of several processes, those of a replica all have its results; else only who has the last stage, and of loss terms
  // each its own.
  bool results_everywhere = false;
};

struct StepResult {
  // Of all microbatches, merged; None unless asked for.
  c10::IValue output = {};
  // By microbatch, of one replica after the other; empty without a loss. Detached.
  std::vector<at::Tensor> losses = {};
  // What PipelineOptions::loss_weight gave for each of them; empty without it.
  std::vector<double> weights = {};
  // Loss terms that stages have added by add_loss, by microbatch and in the order of stages.
  std::vector<std::vector<at::Tensor>> loss_terms = {};

  // Returns the loss of the whole batch: the mean of `losses`, weighted by `weights` if there are any. NaN when nothing
  // counts. A process that is one of several replicas has the losses of its own replica.
  double loss() const;
};

}  // namespace penstock
