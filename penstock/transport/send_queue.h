// The sending side of a process rank. send() starts a message and returns; the queue keeps it until the receiver has
// received it. Tensors on a device are copied to pinned memory first, beside the computation, and sent from there, unless
// their message is sent from device to device.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/device/transfer.h"
#include "penstock/transport/control_channel.h"
#include "penstock/transport/device_operations.h"
#include "penstock/transport/direct_links.h"
#include "penstock/transport/host_receives.h"
#include "penstock/transport/monitor.h"
#include "penstock/transport/staging_thread.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// Used by the rank's thread. A thread of the queue, the reaper, frees sends that have completed while many are in
// flight. Another one starts sends when their copies from a device have ended.
class SendQueue {
 public:
  // The reaper is woken when more than this is in flight. Below, completed sends are freed at the end of the step,
  // which saves waking a thread.
  static constexpr std::size_t kReapSends = 32;
  static constexpr std::size_t kReapBytes = std::size_t{4} << 20U;

  // The references must outlive the queue. They belong to the transport that the queue is a member of.
  SendQueue(ControlChannel& control, DataBackends& backends, TransportStep& step, DirectLinks& links,
            DeviceOperations& operations);
  // Drops what is in flight.
  ~SendQueue();
  SendQueue(const SendQueue&) = delete;
  SendQueue& operator=(const SendQueue&) = delete;

  // Starts to send a message. Blocks (backpressure) only if much more than kReapBytes is staged and in flight. Throws
  // TransportError, UnsendableTensor, and PipeliningShapeError if the receiver expects other shapes.
  void send(int to, Tag tag, const Message& message, Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Blocks until all messages have been received, except for those from device to device. Throws TransportError.
  void drain(Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Tells a rank that this one has ended its step. Does not block.
  void send_end_of_step(int to) PENSTOCK_EXCLUDES(monitor_) {
    start(to, {}, MessageKind::EndOfStep, std::string(1, '\0'));
  }
  // Call it on the thread of the rank.
  void begin_step() PENSTOCK_EXCLUDES(monitor_);
  // Joins the threads.
  void stop() PENSTOCK_EXCLUDES(monitor_);

 private:
  struct Channel {
    Headers headers = Headers::On;
    ShapeCache shapes;
  };
  struct Sent {
    int to = 0;
    std::size_t bytes = 0;
    c10::intrusive_ptr<c10d::Work> work;
  };

  Channel& channel_of(int to, Tag tag);
  // Decides if the channel has headers in this step. The receiver has to be notified.
  void open(Channel& channel) const;
  // Sends the metadata of a message, and adds it to the cache.
  void send_header(Channel& channel, const std::vector<Packed>& parts, int to, Tag tag);
  void send_with_header(Channel& channel, const std::vector<Packed>& parts, const Metas* expected, int to, Tag tag);
  void send_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind);
  // Does the same when the copies of the parts in pinned memory are complete.
  void stage_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind) PENSTOCK_EXCLUDES(monitor_);
  // Sends a message from device to device. Does not block.
  void send_directly(DirectLink& link, Tag tag, std::vector<Packed> parts);
  void start(int to, Tag tag, MessageKind kind, const at::Tensor& bytes) PENSTOCK_EXCLUDES(monitor_);
  void start(int to, Tag tag, MessageKind kind, const std::string& bytes) PENSTOCK_EXCLUDES(monitor_);

  // Waits for the oldest send, with the monitor unlocked meanwhile. Puts it back into the queue if the wait fails.
  void wait_for_oldest(Deadline deadline) PENSTOCK_REQUIRES(monitor_);
  // Does the same on the rank's thread, and shows in Step::waiting_for which rank it waits for.
  void wait_for_oldest_on_rank_thread(Deadline deadline) PENSTOCK_REQUIRES(monitor_);
  void reap() PENSTOCK_EXCLUDES(monitor_);
  // Blocks until everything that was staged has been started. Throws what was thrown at that.
  void wait_for_staging(Clock::duration timeout) PENSTOCK_EXCLUDES(monitor_);
  // Blocks until something that was staged has been started, with the monitor unlocked meanwhile. The timeout is that of
  // one message, as a device may be many computations behind.
  void wait_for_staged(Clock::duration timeout) PENSTOCK_REQUIRES(monitor_);
  bool needs_reaping() const PENSTOCK_REQUIRES(monitor_);
  bool is_over_limit() const PENSTOCK_REQUIRES(monitor_);

  // Owned by the rank's thread.
  ControlChannel& control_;
  DataBackends& backends_;
  TransportStep& step_;
  DirectLinks& links_;
  DeviceOperations& operations_;
  // Channels by receiver and number.
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
  // Channels of messages from device to device. A channel may be in both maps, in different steps.
  std::map<std::pair<int, std::uint32_t>, Channel> direct_channels_;
  // True if a message of this step has been sent with a header.
  bool headers_sent_ = false;
  CopyStreams copies_;

  // Protects what the rank's thread and the reaper share. A leaf lock: no other is acquired while it is held.
  Monitor monitor_{Clock::duration::zero()};
  std::deque<Sent> in_flight_ PENSTOCK_GUARDED_BY(monitor_);
  // Includes the sends that a thread waits for.
  std::size_t bytes_in_flight_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Number and bytes of the tensors that were staged and not started yet.
  std::size_t staged_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  std::size_t staged_bytes_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Number of sends that were taken out of in_flight_ and are being waited for.
  std::size_t waited_for_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Profilers of the rank's thread in this step. What the reaper frees is reported to them, as the rank allocated it.
  std::shared_ptr<c10::ThreadLocalDebugInfo> profilers_ PENSTOCK_GUARDED_BY(monitor_);
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  // The last members, as their threads use all of the above.
  std::thread reaper_;
  StagingThread staging_;
};

}  // namespace penstock::internal
