// Moves the arguments and targets of microbatches to the devices of the stages that take them: each when the host begins
// its microbatch, beside the computation of those before it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <map>
#include <optional>
#include <unordered_set>
#include <utility>

#include "penstock/device/transfer.h"
#include "penstock/runtime/step_state.h"
#include "penstock/tensor/microbatch.h"

namespace penstock::internal {

// Used by the thread of one rank.
class DeviceInputs {
 public:
  // Begins a step. `inputs` outlives it.
  void begin_step(const StepInputs& inputs);
  // Blocks until the copies from the host have ended, as the caller may write to its tensors after the step. They wait
  // for no computation. Throws TransportError at the deadline.
  void end_step(Deadline deadline);

  // Returns the value with its tensors on the device, or nothing if all of them are there already. A tensor that
  // requires a gradient is moved by autograd, which moves its gradient back. A tensor that several microbatches take
  // whole is moved once in a step. Throws TransportError if a tensor has not come from another device to the CPU by the
  // deadline.
  std::optional<c10::IValue> moved(const c10::IValue& value, at::Device device, Deadline deadline);
  std::optional<Args> moved(const Args& args, at::Device device, Deadline deadline);
  std::optional<Kwargs> moved(const Kwargs& kwargs, at::Device device, Deadline deadline);

 private:
  at::Tensor move(const at::Tensor& tensor, at::Device device, Deadline deadline);
  bool is_repeated(const at::Tensor& tensor);

  const StepInputs* inputs_ = nullptr;
  // Copies from the host wait for no computation, so they have streams of their own.
  CopyStreams from_host_;
  CopyStreams from_devices_;
  // Tensors that several microbatches take whole; not set before the first tensor is moved.
  std::optional<std::unordered_set<const void*>> repeated_;
  // The end of the copies from the host.
  StreamPoint copied_from_host_;
  // Copies of these, by device.
  std::map<std::pair<const void*, at::DeviceIndex>, at::Tensor> copies_;
};

}  // namespace penstock::internal
