// The operations of device backends that are in flight on one rank. A thread polls them: it frees the tensors of sends
// that have completed, and aborts all backends when an operation fails, when its deadline passes, or when the transport
// is aborted. The streams of the device then continue with undefined values, and every wait of the rank throws.
//
//   operations.add({.works = {work}, .tensors = {tensor}, .peer = 1, .what = "no receive was posted on rank 1"});
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "penstock/device/streams.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/monitor.h"

namespace penstock::internal {

struct DeviceOperation {
  // In the order in which they complete.
  std::vector<c10::intrusive_ptr<c10d::Work>> works = {};
  // Kept until the works have completed.
  std::vector<at::Tensor> tensors = {};
  // The operation may take `timeout` from this point of the device on. Devices run behind the host, so no time is counted
  // before. If unset, DeviceOperations::end_step sets both.
  StreamPoint awaited = {};
  std::optional<Clock::duration> timeout = std::nullopt;
  // Rank that the operation waits for, or kNoPeer, and the beginning of the error's text.
  int peer = TransportError::kNoPeer;
  std::string what = {};
};

// Thread-safe, except for drain(), stop() and the destructor, which one thread calls. abort() only wakes the thread, and
// may be called with any lock held but those of the control channel.
//
// Lock order: monitor_ is a leaf. It is not held while a backend or the control channel is called.
class DeviceOperations {
 public:
  // The control channel provides the errors of lost connections, and is told of those that the thread detects.
  explicit DeviceOperations(std::shared_ptr<ControlChannel> control) : control_(std::move(control)) {}
  ~DeviceOperations() { stop(); }
  DeviceOperations(const DeviceOperations&) = delete;
  DeviceOperations& operator=(const DeviceOperations&) = delete;

  // Adds a backend for tensors on a device, which an abort has to end. The first call starts the thread.
  void add_backend(c10::intrusive_ptr<c10d::Backend> backend, at::Device device) PENSTOCK_EXCLUDES(monitor_);
  // Adds an operation of such a backend.
  void add(DeviceOperation operation) PENSTOCK_EXCLUDES(monitor_);
  // Sets the time of the operations that have none. `end` is the point at which the rank's devices end the step.
  void end_step(const StreamPoint& end, Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Returns the number of operations that have not completed, as far as is known.
  std::size_t in_flight() PENSTOCK_EXCLUDES(monitor_);

  // Blocks until all operations have completed, or are aborted. Those without a time have until the deadline.
  void drain(Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Makes the thread abort all backends, and those that are added later.
  void abort() noexcept PENSTOCK_EXCLUDES(monitor_);
  // Joins the thread, and aborts and releases the backends. If operations have not completed, it waits for the devices
  // to leave them before their memory is freed. `has_others` tells of operations that were not added.
  void stop(bool has_others = false) PENSTOCK_EXCLUDES(monitor_);

 private:
  struct Running {
    DeviceOperation operation;
    // Set when the device has reached the operation's point.
    std::optional<Deadline> deadline;
    // Set when its peer leaves, whose own operations had completed then, or never will.
    std::optional<Deadline> end_of_peer;
  };

  void run() PENSTOCK_EXCLUDES(monitor_);
  // Removes the operations that have completed, and adds them to `completed`, to be freed without the lock. Returns the
  // error of one that has failed.
  std::exception_ptr poll(const std::vector<int>& left, std::vector<Running>& completed, int& peer)
      PENSTOCK_REQUIRES(monitor_);
  // Tells the control channel of an error, which ends the waits of the rank.
  void fail(const std::exception_ptr& error, int peer) PENSTOCK_EXCLUDES(monitor_);
  // Aborts the backends that have not been aborted yet.
  void abort_backends() PENSTOCK_EXCLUDES(monitor_);

  const std::shared_ptr<ControlChannel> control_;

  // Protects what the threads share.
  Monitor monitor_{Clock::duration::zero()};
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends_ PENSTOCK_GUARDED_BY(monitor_);
  std::vector<at::Device> devices_ PENSTOCK_GUARDED_BY(monitor_);
  // Number of the first backends that have been aborted.
  std::size_t aborted_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Declared after the backends: operations are destroyed first.
  std::vector<Running> running_ PENSTOCK_GUARDED_BY(monitor_);
  bool aborting_ PENSTOCK_GUARDED_BY(monitor_) = false;
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  // The last member, as the thread uses all of the above.
  std::thread thread_;
};

}  // namespace penstock::internal
