// Time spans of a device's work, as the device saw them. Events mark when a stream reached the beginning and the end;
// a clock turns them into the host's time afterwards, so that spans of all devices are on one clock.
//
//   DeviceSpan span = DeviceSpan::begin(stream);
//   …                                         // appends work to the stream
//   span.end(stream);
//   const auto clock = DeviceClock::recent(stream.device(), deadline);  // waits for the device
//   Clock::time_point began = clock->time_of(*span.began());
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"

namespace penstock::internal {

// An event of which the device notes the time. Null stands for none.
using TimedEvent = std::shared_ptr<const c10::Event>;

// Returns an event after all work that is in the stream.
TimedEvent timed_event(const c10::Stream& stream);

// A span of a stream's work; empty if nothing has begun. Cheap to copy.
class DeviceSpan {
 public:
  static DeviceSpan begin(const c10::Stream& stream);
  void end(const c10::Stream& stream);

  bool empty() const { return began_ == nullptr; }
  const TimedEvent& began() const { return began_; }
  const TimedEvent& ended() const { return ended_; }

 private:
  TimedEvent began_;
  TimedEvent ended_;
};

// Returns a stream that only waits, to measure when other streams come so far. It has high priority, so it is never one of
// stream_of_pool(), and no work waits with it. Returns nullopt if the device has no pool of such streams.
std::optional<c10::Stream> observing_stream(at::Device device);

// Collects the spans of the transfers that the calling thread starts, until it is destroyed on the same thread: copies
// between devices, or between a device and the host, and messages that a device backend sends or receives. Logs do not
// nest.
class TransferLog {
 public:
  TransferLog();
  ~TransferLog();
  TransferLog(const TransferLog&) = delete;
  TransferLog& operator=(const TransferLog&) = delete;

  // Returns what was collected since the last call.
  std::vector<DeviceSpan> take() { return std::exchange(spans_, {}); }

  // Adds a span to the calling thread's log, if it has one.
  static void add(const DeviceSpan& span);

 private:
  std::vector<DeviceSpan> spans_;
};

// Tells the host's time of the events of one device, by comparison with an event of its own. Clocks of a device and of the host drift apart by some microseconds in a second.
class DeviceClock {
 public:
  // Returns a clock that was made in the last ten seconds, by any thread, or makes one: so that the host does not wait
  // for the device each time. Returns null if the device has not reached the clock's event at the deadline.
  static std::shared_ptr<const DeviceClock> recent(at::Device device, Deadline deadline);

  // Returns the time at which the clock was made.
  Clock::time_point made() const { return host_now_; }

  // Returns the time at which the device reached an event, which it has reached. `is_later` tells that the event was
  // recorded after the clock was made: not every type of device can tell negative times.
  Clock::time_point time_of(const c10::Event& event, bool is_later = false) const;

 private:
  DeviceClock(TimedEvent now, Clock::time_point host_now) : now_(std::move(now)), host_now_(host_now) {}

  TimedEvent now_;
  Clock::time_point host_now_;
};

}  // namespace penstock::internal
