// Compares the parameters and buffers of a model with those of a file, and loads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

namespace penstock::internal {

struct ModelTensor {
  // All names of the tensor in the model; a tied parameter has several.
  std::vector<std::string> names;
  at::Tensor tensor;
  // False for a buffer that the model's state_dict leaves out: a file may have it or not.
  bool is_required = true;
};

// Returns how `found` differs from a model, as indented lines without a newline at the end: tensors that are missing or
// unexpected, that have another shape or dtype, or whose values contradict each other because they share memory in the
// model. Returns at most ten lines, with a few of each kind, and an empty text if all of `found` fits. One name of a
// tied parameter is enough.
std::string state_differences(const std::vector<ModelTensor>& model, const std::map<std::string, at::Tensor>& found);

// Copies a value into a tensor of the same sizes, in place and without gradients. Elements of an expanded dimension are
// one element in memory, which is copied once.
void load_tensor(const at::Tensor& tensor, at::Tensor value);

// Copies values into the model's tensors, in place and without gradients. Requires that there are no state_differences.
void load_state(const std::vector<ModelTensor>& model, const std::map<std::string, at::Tensor>& found);

}  // namespace penstock::internal
