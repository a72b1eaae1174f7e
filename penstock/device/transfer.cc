#include "penstock/device/transfer.h"

#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "penstock/device/device_span.h"
#include "penstock/device/faults.h"

namespace penstock::internal {

#ifdef PENSTOCK_FAULTS
Fault injected_fault = Fault::None;
#endif

c10::Stream CopyStreams::of(ByDevice& streams, at::Device device) {
  const auto found = streams.find(device.index());
  if (found != streams.end()) return found->second;
  return streams.emplace(device.index(), stream_of_pool(device)).first->second;
}

DeviceCopy::DeviceCopy(const at::Tensor& source, at::Device target, const StreamPoint& ready, CopyStreams& streams,
                       bool keeps_history) {
  target = with_index(target);
  if (!source.defined() || source.device() == target || source.is_meta() || target.is_meta()) {
    tensor_ = source;
    done_ = ready;
    return;
  }
  std::vector<c10::Stream> used;
  if (has_streams(source.device())) used.push_back(streams.outgoing(source.device()));
  if (has_streams(target)) used.push_back(streams.incoming(target));
  for (const c10::Stream& stream : used) {
    if (!is_injected(Fault::CopyWithoutEvent)) ready.block(stream);
    if (!is_injected(Fault::EarlyFree)) use_on_stream(source, stream);
  }
  const c10::AutoGradMode grad_mode(keeps_history && c10::GradMode::is_enabled());
  const c10::MultiStreamGuard guard(used);
  // Both ends of a copy between two devices see it at the same time.
  DeviceSpan span = DeviceSpan::begin(used.front());
  const at::Tensor given = keeps_history ? source : source.detach();
  tensor_ = given.to(given.options().device(target), /*non_blocking=*/true);
  span.end(used.front());
  TransferLog::add(span);
  for (const c10::Stream& stream : used) done_.add(StreamPoint::after(stream));
  if (!keeps_history && source.requires_grad()) tensor_.set_requires_grad(true);
}

at::Tensor DeviceCopy::take(Deadline deadline) {
  if (!tensor_.defined()) return {};
  if (!has_streams(tensor_.device())) return done_.wait(deadline) ? tensor_ : at::Tensor();
  if (!is_injected(Fault::UseBeforeCopy)) done_.block(tensor_.device());
  use_on_stream(tensor_);
  return tensor_;
}

bool move_to_device(std::vector<at::Tensor>& tensors, at::Device target, const StreamPoint& ready, CopyStreams& streams,
                    Deadline deadline) {
  std::vector<DeviceCopy> copies;
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined() || (tensor.is_cpu() && target.is_cpu())) continue;
    copies.emplace_back(tensor, target, ready, streams);
  }
  auto copy = copies.begin();
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined() || (tensor.is_cpu() && target.is_cpu())) continue;
    tensor = (copy++)->take(deadline);
    if (!tensor.defined()) return false;
  }
  return true;
}

at::Tensor copied_to(const at::Tensor& tensor, at::Device device, bool always) {
  return tensor.to(device, /*non_blocking=*/!device.is_cpu(), /*copy=*/always);
}

std::vector<at::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cpu() || !has_streams(tensor.device())) continue;
    if (std::ranges::find(devices, tensor.device()) == devices.end()) devices.push_back(tensor.device());
  }
  return devices;
}

}  // namespace penstock::internal
