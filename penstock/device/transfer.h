// Copies of tensors between devices, and between a device and the host. They run in streams of their own, beside the
// computation, and the host does not wait for them.
//
//   CopyStreams streams;
//   DeviceCopy copy(activation, at::Device("cuda:1"), produced, streams);
//   at::Tensor received = copy.take(deadline);   // the current stream of cuda:1 waits for the copy
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/streams.h"

namespace penstock::internal {

// The streams of a rank in which copies run: for each device one for tensors that come in, and one for tensors that go
// out, so that neither waits for the other. Used by one thread.
class CopyStreams {
 public:
  c10::Stream incoming(at::Device device) { return of(incoming_, device); }
  c10::Stream outgoing(at::Device device) { return of(outgoing_, device); }

 private:
  using ByDevice = std::map<c10::DeviceIndex, c10::Stream>;
  static c10::Stream of(ByDevice& streams, at::Device device);

  ByDevice incoming_;
  ByDevice outgoing_;
};

// A tensor on its way to a device: a copy of it, or the tensor itself if it is there already.
class DeviceCopy {
 public:
  // Starts the copy when `ready` is reached, the point at which the source has its values. A meta tensor stays what it is. The memory of the source may
  // be freed at once: its allocator knows that the copy uses it. A host tensor must not be written to before the copy
  // has ended. The result requires a gradient if the source does; it has no history, unless it is to keep that of the
  // source. The thread's TransferLog gets the span of the copy.
  DeviceCopy(const at::Tensor& source, at::Device target, const StreamPoint& ready, CopyStreams& streams,
             bool keeps_history = false);

  // Returns the tensor. Later work of the calling thread's current stream on the target comes after the copy. On the
  // CPU, it blocks until the copy has ended; it returns an undefined tensor at the deadline.
  at::Tensor take(Deadline deadline);

  // Returns the point at which the copy has ended.
  const StreamPoint& done() const { return done_; }
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
  StreamPoint done_;
};

// Moves tensors to a device, as DeviceCopy does. Returns false at the deadline, for which only the CPU has to wait.
[[nodiscard]] bool move_to_device(std::vector<at::Tensor>& tensors, at::Device target, const StreamPoint& ready,
                                  CopyStreams& streams, Deadline deadline);

// Returns a copy of a tensor on a device, made in the calling thread's current streams; the tensor itself if it is there
// already, unless `always`. The host waits for a copy to the CPU, which it may read at once, and for no other.
at::Tensor copied_to(const at::Tensor& tensor, at::Device device, bool always = false);

// Returns the devices with streams that the tensors lie on, each once.
std::vector<at::Device> devices_of(const std::vector<at::Tensor>& tensors);

}  // namespace penstock::internal
