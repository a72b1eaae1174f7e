// What a stage computes: a function of its arguments, with the parameters and buffers that it uses. modules.h makes one
// of torch::nn modules and of TorchScript.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

struct StageModule {
  std::function<c10::IValue(const Args& args, const Kwargs& kwargs)> forward;
  NamedTensors parameters = {};
  NamedTensors buffers = {};
};

}  // namespace penstock
