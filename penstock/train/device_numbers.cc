#include "penstock/train/device_numbers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include <cstddef>
#include <map>

#include "penstock/base/deadline.h"
#include "penstock/device/host_copies.h"
#include "penstock/device/streams.h"
#include "penstock/runtime/error.h"

namespace penstock::internal {

void DeviceNumbers::add(const at::Tensor& number, double* target) {
  if (has_streams(number.device())) {
    waiting_.emplace_back(number, target);
  } else {
    *target = number.item<double>();
  }
}

void DeviceNumbers::read(std::chrono::milliseconds timeout) {
  const at::NoGradGuard no_grad;
  struct OnDevice {
    std::vector<at::Tensor> numbers = {};
    std::vector<double*> targets = {};
    at::Tensor copy = {};
  };
  std::map<at::DeviceIndex, OnDevice> by_device;
  for (auto& [number, target] : waiting_) {
    // Its memory may belong to the stream of a rank.
    use_on_stream(number);
    OnDevice& device = by_device[number.device().index()];
    device.numbers.push_back(number.reshape({}).to(at::kDouble));
    device.targets.push_back(target);
  }
  waiting_.clear();
  HostCopies copies;
  for (auto& [index, device] : by_device) device.copy = copies.start(at::stack(device.numbers));
  if (!copies.wait(deadline_after(timeout))) {
    throw PipelineError(
        "a device has not computed the losses and gradients of the step within the timeout.\n"
        "  Hint: look whether another program uses the device, or raise the timeout.");
  }
  for (const auto& [index, device] : by_device) {
    const double* const numbers = device.copy.const_data_ptr<double>();
    for (std::size_t i = 0; i < device.targets.size(); ++i) *device.targets[i] = numbers[i];
  }
}

}  // namespace penstock::internal
