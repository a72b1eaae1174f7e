// The operations of device backends that are in flight on one rank. A thread polls them: it frees the tensors of sends
// that have completed, and aborts all backends when an operation fails, when its deadline passes, or when the transport
// is aborted. The streams of the device then continue with undefined values, and every wait of the rank throws.
//
//   operations.add({.works = {work}, .tensors = {tensor}, .peer = 1, .what = "no receive was posted on rank 1"});
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/device/streams.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/monitor.h"
#include "penstock/transport/transport.h"

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
  // The message that it sends or receives; none for a collective.
  std::optional<Tag> tag = std::nullopt;
  bool is_receive = false;
};

// Limits the tensors that are in flight at a time.
struct SendLimit {
  // Number of tensors that may be in flight whatever their size, and whatever their number.
  std::size_t least = 0;
  std::size_t most = 0;
  // Their bytes, if they are more than `least`.
  std::size_t bytes = 0;
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
  // Call it at the beginning of a step, when no operation is in flight.
  void begin_step() PENSTOCK_EXCLUDES(monitor_);
  // Blocks while more tensors of messages of this kind (Tag::channel modulo 2) to a rank are in flight, so that their
  // memory does not grow with the number of messages. `waiting_for` is set to the rank meanwhile. Returns after an abort.
  // Throws TransportError at the deadline.
  //
  // It waits for the oldest message, whose receive is posted by an action that does not depend on later ones of this
  // rank. This holds if the receiver knows the shapes of its channel in this step, so it waits for no other: a message of
  // the channel has been received. Of a backend whose small sends complete before they are received, this is not certain;
  // such sends do not count as in flight either.
  void limit_sends(int to, std::uint32_t kind, const SendLimit& limit, std::atomic<int>& waiting_for, Deadline deadline)
      PENSTOCK_EXCLUDES(monitor_);
  // Sets the time of the operations that have none. `end` is the point at which the rank's devices end the step.
  void end_step(const StreamPoint& end, Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Returns the number of operations that have not completed, as far as is known.
  std::size_t in_flight() PENSTOCK_EXCLUDES(monitor_);
  // Returns the message that a device has waited for longest, or had when the backends were aborted.
  std::optional<AwaitedMessage> awaited() PENSTOCK_EXCLUDES(monitor_);

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
    // Set when the device has reached the operation's point: the time, and the deadline from then on.
    std::optional<Clock::time_point> since;
    Deadline deadline = Deadline::max();
    // Set when its peer leaves, whose own operations had completed then, or never will.
    std::optional<Deadline> end_of_peer;
  };

  void run() PENSTOCK_EXCLUDES(monitor_);
  // Notes that the operation has completed, and adds it to `completed`, to be freed without the lock.
  void complete(Running& running, std::vector<Running>& completed) PENSTOCK_REQUIRES(monitor_);
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
  // Receivers and channels of the sends that have completed in this step.
  std::set<std::pair<int, std::uint32_t>> received_ PENSTOCK_GUARDED_BY(monitor_);
  bool aborting_ PENSTOCK_GUARDED_BY(monitor_) = false;
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  // The last member, as the thread uses all of the above.
  std::thread thread_;
};

}  // namespace penstock::internal
