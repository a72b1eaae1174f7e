// Stages out of what libtorch has for modules. To include this is to include torch::nn, which takes its time to compile.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/script.h>

#include "penstock/stage/module.h"

namespace penstock {

// Modules of one tensor, or of up to four for AnyModule's, to one tensor or a tuple of tensors. They take no keyword
// arguments. Parameters and buffers are those of the module, shared with it.
StageModule stage_module(torch::nn::Sequential sequential);
StageModule stage_module(torch::nn::AnyModule module);
// TorchScript, with any arguments.
StageModule stage_module(torch::jit::Module module);

// Any module with a function that calls it: stage_module(model, [](Model& m, const Args& args, const Kwargs&) { … }).
template <class Module, class Forward>
StageModule stage_module(const torch::nn::ModuleHolder<Module>& holder, Forward forward);

}  // namespace penstock
