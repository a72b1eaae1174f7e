// Numbers that are computed on devices, and read with one wait of the host for all of them.
//
//   DeviceNumbers numbers;
//   numbers.add(loss, &loss_value);
//   numbers.add(norm, &norm_value);
//   numbers.read(timeout);             // loss_value and norm_value are set
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <utility>
#include <vector>

namespace penstock::internal {

class DeviceNumbers {
 public:
  // Adds a tensor of one element, which is written to `target` when it is read: at once from a tensor on the CPU.
  void add(const at::Tensor& number, double* target);
  // Reads all numbers, and forgets them. The calling thread's current streams come after the work that computes them.
  // Throws PipelineError if a device has not computed them within the timeout.
  void read(std::chrono::milliseconds timeout);

 private:
  std::vector<std::pair<at::Tensor, double*>> waiting_;
};

}  // namespace penstock::internal
