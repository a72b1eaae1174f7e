// Makes StageModules from torch::nn modules and TorchScript. This header includes torch::nn, which is slow to compile.
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

// Returns a StageModule with the parameters and buffers of the module, under their full names, and without a `forward`.
StageModule stage_module_without_forward(const torch::nn::Module& module);

struct SequentialOptions {
  // Checkpoints every n-th module (checkpoint.h): it saves its inputs only, and is computed again in the backward. 1
  // for all modules, 0 for none.
  int checkpoint_every = 0;
};

// Return the StageModule of a module that takes one to four tensors and returns one tensor or a tuple of two to four.
// Its forward throws StageError for any other arguments, and for keyword arguments. Throw StageError for an empty
// module.
StageModule stage_module(torch::nn::Sequential sequential, const SequentialOptions& options = {});
StageModule stage_module(torch::nn::AnyModule module);

// Returns the StageModule of a TorchScript module, which may take any arguments.
StageModule stage_module(torch::jit::Module module);

// Returns the StageModule of any module, with a function that calls it: forward(holder, args, kwargs) returns an
// IValue.
template <class Holder, class Forward>
StageModule stage_module(Holder holder, Forward forward) {
  StageModule result = stage_module_without_forward(*holder);
  result.forward = [holder = std::move(holder), forward = std::move(forward)](const Args& args, const Kwargs& kwargs) {
    // A copy of a holder refers to the same module; `forward` may take it by non-const reference.
    Holder copy = holder;
    return c10::IValue(forward(copy, args, kwargs));
  };
  return result;
}

}  // namespace penstock
