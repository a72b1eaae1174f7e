// Copies of device tensors in host memory, for which the host waits once.
//
//   HostCopies copies;
//   const at::Tensor losses = copies.start(device_losses);
//   const at::Tensor norms = copies.start(device_norms);
//   if (!copies.wait(deadline)) …                            // both are readable now
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/transfer.h"

namespace penstock::internal {

// Starts a copy to pinned memory, after all work in the calling thread's current stream on the tensor's device, and adds
// its end to `copied`. Returns the copy; of a host tensor, the tensor itself.
at::Tensor copy_to_host(const at::Tensor& tensor, CopyStreams& streams, StreamPoint& copied);

// Used by one thread.
class HostCopies {
 public:
  // Starts a copy to pinned memory, after all work in the calling thread's current stream on the tensor's device, and
  // beside later work of that stream. Returns the copy, which must not be read before wait(). The source may be freed at
  // once, and must not be written to before later work has been blocked by done(). Returns a host tensor itself.
  at::Tensor start(const at::Tensor& tensor);

  // Returns the point at which all copies have ended.
  const StreamPoint& done() const { return done_; }
  // Blocks until all copies have ended. Returns false at the deadline. Does nothing if all tensors were on the host.
  [[nodiscard]] bool wait(Deadline deadline) { return done_.wait(deadline); }

 private:
  CopyStreams streams_;
  StreamPoint done_;
};

// Returns a host tensor in pinned memory, from which a copy to a device does not block the host: a copy of the tensor,
// or the tensor itself if it is pinned, or on a device. Requires an accelerator.
at::Tensor pinned(const at::Tensor& tensor);

}  // namespace penstock::internal
