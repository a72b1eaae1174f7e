// The list of tensors and their names that every layer passes around: parameters, buffers, a state_dict, the content of
// a safetensors file.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

namespace penstock {

// Tensors with their names, in the order of the module, program or file that they come from. Names are distinct unless
// a function says otherwise.
//
//   const NamedTensors tensors = {{"weight", weight}, {"bias", bias}};
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace penstock
