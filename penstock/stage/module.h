// The computation of a stage: a function of its arguments, with the parameters and buffers that it uses. modules.h
// makes one from torch::nn modules and from TorchScript.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

// Copies refer to the same tensors. A Pipeline calls `forward` on the thread of the stage's rank, one microbatch at a
// time.
//
//   const at::Tensor weight = at::randn({8, 8}).requires_grad_();
//   StageModule module{.forward = [weight](const Args& args, const Kwargs&) -> c10::IValue {
//                        return args[0].toTensor().mm(weight);
//                      },
//                      .parameters = {{"weight", weight}}};
struct StageModule {
  // Returns a tensor, or a tuple or list of tensors and None. The last stage may return any nested value.
  std::function<c10::IValue(const Args& args, const Kwargs& kwargs)> forward;
  // Tensors whose gradients are accumulated, and tensors without gradients that a forward may write to. Both are
  // synchronised between replicas and restored after a step that failed; a tensor that is in neither list is not.
  NamedTensors parameters = {};
  NamedTensors buffers = {};
  // Names of buffers that no forward writes to, such as masks. No copies of them are made for a rollback or a
  // recomputation.
  std::set<std::string> constant_buffers = {};
  // Further tensors that a forward may write to, which no checkpoint contains and replicas do not synchronise. They are
  // restored after a step that failed, and when a forward is recomputed. A parameter that a forward writes to is in
  // both lists, and cannot be sharded.
  NamedTensors state = {};

  // Returns the tensors that a forward may write to: `state`, and the buffers that are not constant.
  NamedTensors written_tensors() const;
};

}  // namespace penstock
