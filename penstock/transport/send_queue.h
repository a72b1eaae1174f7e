// The sending side of a process rank. send() starts a message and returns; the queue keeps it until the receiver has
// received it.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <array>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "penstock/transport/control_channel.h"
#include "penstock/transport/monitor.h"
#include "penstock/transport/wire.h"

namespace penstock::internal {

// One process group for channels with even numbers and one for the others, so that activations and gradients do not
// wait for each other.
using DataBackends = std::array<c10::intrusive_ptr<c10d::Backend>, 2>;

// Used by the rank's thread. A thread of the queue, the reaper, frees sends that have completed while many are in
// flight.
class SendQueue {
 public:
  // The reaper is woken when more than this is in flight. Below, completed sends are freed at the end of the step,
  // which saves waking a thread.
  static constexpr std::size_t kReapSends = 32;
  static constexpr std::size_t kReapBytes = std::size_t{4} << 20U;

  // `control` and `step` must outlive the queue. Both belong to the transport that the queue is a member of.
  SendQueue(ControlChannel& control, DataBackends backends, TransportStep& step);
  // Drops what is in flight.
  ~SendQueue();
  SendQueue(const SendQueue&) = delete;
  SendQueue& operator=(const SendQueue&) = delete;

  // Starts to send a message. Blocks (backpressure) only if much more than kReapBytes is in flight. Throws
  // TransportError, UnsendableTensor, and PipeliningShapeError if the receiver expects other shapes.
  void send(int to, Tag tag, const Message& message, Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Blocks until all messages have been received. Throws TransportError.
  void drain(Deadline deadline) PENSTOCK_EXCLUDES(monitor_);
  // Call it on the thread of the rank.
  void begin_step() PENSTOCK_EXCLUDES(monitor_);
  // Joins the reaper.
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
  // Decides if the channel has headers in this step, and notifies the receiver.
  void send_opening(Channel& channel, int to, Tag tag);
  void send_with_header(Channel& channel, const std::vector<Packed>& parts, const Metas* expected, int to, Tag tag);
  void send_parts(const std::vector<Packed>& parts, int to, Tag tag, MessageKind kind);
  void start(int to, Tag tag, MessageKind kind, const at::Tensor& bytes) PENSTOCK_EXCLUDES(monitor_);
  void start(int to, Tag tag, MessageKind kind, const std::string& bytes) PENSTOCK_EXCLUDES(monitor_);

  // Waits for the oldest send, with the monitor unlocked meanwhile. Puts it back into the queue if the wait fails.
  void wait_for_oldest(Deadline deadline) PENSTOCK_REQUIRES(monitor_);
  // Does the same on the rank's thread, and shows in Step::waiting_for which rank it waits for.
  void wait_for_oldest_on_rank_thread(Deadline deadline) PENSTOCK_REQUIRES(monitor_);
  void reap() PENSTOCK_EXCLUDES(monitor_);
  bool needs_reaping() const PENSTOCK_REQUIRES(monitor_);
  bool is_over_limit() const PENSTOCK_REQUIRES(monitor_);

  // Owned by the rank's thread.
  ControlChannel& control_;
  DataBackends backends_;
  TransportStep& step_;
  // Channels by receiver and number.
  std::map<std::pair<int, std::uint32_t>, Channel> channels_;
  // True if a message of this step has been sent with a header.
  bool headers_sent_ = false;

  // Protects what the rank's thread and the reaper share. A leaf lock: no other is acquired while it is held.
  Monitor monitor_{Clock::duration::zero()};
  std::deque<Sent> in_flight_ PENSTOCK_GUARDED_BY(monitor_);
  // Includes the sends that a thread waits for.
  std::size_t bytes_in_flight_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Number of sends that were taken out of in_flight_ and are being waited for.
  std::size_t waited_for_ PENSTOCK_GUARDED_BY(monitor_) = 0;
  // Profilers of the rank's thread in this step. What the reaper frees is reported to them, as the rank allocated it.
  std::shared_ptr<c10::ThreadLocalDebugInfo> profilers_ PENSTOCK_GUARDED_BY(monitor_);
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  // The last member, as the thread uses all of the above.
  std::thread reaper_;
};

}  // namespace penstock::internal
