// Stages out of what libtorch has for modules. To include this is to include torch::nn, which takes its time to compile.
//
//   PipelineStage stage(stage_module(torch::nn::Sequential(torch::nn::Linear(8, 8), torch::nn::ReLU())), 0, 2);
//   PipelineStage other(stage_module(block, [](Block& b, const Args& args, const Kwargs& kwargs) -> c10::IValue {
//                         return b->forward(args[0].toTensor(), kwargs.at("mask").toTensor());
//                       }), 1, 2);
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <utility>

#include "penstock/stage/module.h"

namespace penstock {

// Parameters and buffers are the module's own, by their full names; `forward` is not set.
StageModule stage_module_without_forward(const torch::nn::Module& module);

// Modules of one to four tensors, to one tensor or a tuple of two to four, without keyword arguments; any other
// arguments are a StageError when they come.
StageModule stage_module(torch::nn::Sequential sequential);
StageModule stage_module(torch::nn::AnyModule module);

// TorchScript, with any arguments.
StageModule stage_module(torch::jit::Module module);

// Any module, by a function that calls it: forward(holder, args, kwargs) gives an IValue.
template <class Holder, class Forward>
StageModule stage_module(Holder holder, Forward forward) {
  StageModule result = stage_module_without_forward(*holder);
  result.forward = [holder = std::move(holder), forward = std::move(forward)](const Args& args, const Kwargs& kwargs) {
    // A holder's copies are the same module.
    Holder own = holder;
    return c10::IValue(forward(own, args, kwargs));
  };
  return result;
}

}  // namespace penstock
