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

struct StepOptions {
  // Keyword arguments of later stages, by stage. They are split as those of the first are.
  std::map<int, Kwargs> stage_kwargs = {};
  Kwargs loss_kwargs = {};
  // Which step it is, for the random numbers that stages draw; left out: they are counted.
  std::optional<std::int64_t> number = std::nullopt;
  // The weight of each microbatch's loss, for one replica of this process after the other; left out: 1 / microbatches, or 1
  // without scale_grads.
  std::vector<double> weights = {};
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
  // Terms that stages have handed in by add_loss, by microbatch and in the order of stages.
  std::vector<std::vector<at::Tensor>> loss_terms = {};
};

}  // namespace penstock
