// Parameters and buffers of a group's first member, with which all replicas of a stage start.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/stage/module.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

class FirstMemberValues {
 public:
  // Receives the values. Blocks until all members have them, so that either all members can adopt them or none.
  FirstMemberValues(const StageModule& module, Group& group, Deadline deadline);

  // Copies the values into the module's parameters and buffers, and releases them.
  void adopt();

 private:
  // The module's tensors, each once, and the values for each.
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> values_;
};

}  // namespace penstock::internal
