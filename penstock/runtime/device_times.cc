#include "penstock/runtime/device_times.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "penstock/device/streams.h"

namespace penstock::internal {
namespace {

// One clock for each device.
class DeviceClocks {
 public:
  DeviceClocks(Clock::time_point began, Deadline deadline) : began_(began), deadline_(deadline) {}

  // Returns the nanoseconds from the beginning of the step to the event, or nullopt if the device has not reached it at
  // the deadline.
  std::optional<std::int64_t> time_of(const c10::Event& event) {
    std::shared_ptr<const DeviceClock>& clock = clocks_[event.device().index()];
    if (!clock) clock = DeviceClock::recent(event.device(), deadline_);
    if (!clock || !wait_for(event, deadline_)) return std::nullopt;
    return std::chrono::duration_cast<std::chrono::nanoseconds>(clock->time_of(event, clock->made() < began_) - began_)
        .count();
  }
  struct Span {
    std::int64_t start = 0;
    std::int64_t end = 0;
  };
  std::optional<Span> span_of(const TimedEvent& began, const TimedEvent& ended) {
    if (!began || !ended) return std::nullopt;
    const std::optional<std::int64_t> start = time_of(*began);
    const std::optional<std::int64_t> end = time_of(*ended);
    return start && end ? std::optional(Span{.start = *start, .end = *end}) : std::nullopt;
  }
  std::optional<Span> span_of(const DeviceSpan& span) { return span_of(span.began(), span.ended()); }

 private:
  Clock::time_point began_;
  Deadline deadline_;
  std::map<c10::DeviceIndex, std::shared_ptr<const DeviceClock>> clocks_;
};

}  // namespace

void DeviceTimes::begin(std::size_t action, at::Device device) {
  actions_[action].began = timed_event(current_stream(device));
}

void DeviceTimes::end(std::size_t action, at::Device device) {
  actions_[action].ended = timed_event(current_stream(device));
}

void DeviceTimes::set_transfers(std::size_t action, std::vector<DeviceSpan> transfers, std::int64_t bytes) {
  actions_[action].transfers = std::move(transfers);
  actions_[action].bytes = bytes;
}

void DeviceTimes::resolve(std::vector<ActionRecord>& record, Clock::time_point began, Deadline deadline) {
  DeviceClocks clocks(began, deadline);
  for (std::size_t i = 0; i < std::min(actions_.size(), record.size()); ++i) {
    const ActionEvents& events = actions_[i];
    ActionRecord& action = record[i];
    for (const DeviceSpan& transfer : events.transfers) {
      const auto found = clocks.span_of(transfer);
      if (!found) continue;
      action.transfer_start = action.has_transfer() ? std::min(action.transfer_start, found->start) : found->start;
      action.transfer_end = std::max(action.transfer_end, found->end);
      action.bytes = events.bytes;
    }
    const auto found = clocks.span_of(events.began, events.ended);
    if (!found) continue;
    action.start = found->start;
    action.end = found->end;
    action.waited = 0;
    for (const DeviceSpan& wait : events.waits) {
      if (const auto waited = clocks.span_of(wait)) action.waited += waited->end - waited->start;
    }
  }
  actions_.clear();
}

}  // namespace penstock::internal
