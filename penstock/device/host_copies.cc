#include "penstock/device/host_copies.h"

namespace penstock::internal {

at::Tensor copy_to_host(const at::Tensor& tensor, CopyStreams& streams, StreamPoint& copied) {
  if (!tensor.defined() || !has_streams(tensor.device())) return tensor;
  const DeviceCopy copy(tensor, at::kCPU, StreamPoint::now(tensor.device()), streams);
  copied.add(copy.done());
  return copy.tensor();
}

at::Tensor HostCopies::start(const at::Tensor& tensor) {
  return copy_to_host(tensor, streams_, done_);
}

at::Tensor pinned(const at::Tensor& tensor) {
  const bool can_pin = tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.numel() > 0;
  return can_pin && !tensor.is_pinned() ? tensor.pin_memory() : tensor;
}

}  // namespace penstock::internal
