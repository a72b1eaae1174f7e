#include "penstock/runtime/device_times.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "penstock/device/streams.h"

namespace penstock::internal {
namespace {

// One clock for each device.
class DeviceClocks {
 public:
  explicit DeviceClocks(Clock::time_point began) : began_(began) {}

  // Returns the nanoseconds from the beginning of the step to the event.
  std::int64_t time_of(const c10::Event& event) {
    std::shared_ptr<const DeviceClock>& clock = clocks_[event.device().index()];
    if (!clock) clock = DeviceClock::recent(event.device());
    return std::chrono::duration_cast<std::chrono::nanoseconds>(clock->time_of(event, clock->made() < began_) - began_)
        .count();
  }

 private:
  Clock::time_point began_;
  std::map<c10::DeviceIndex, std::shared_ptr<const DeviceClock>> clocks_;
};

}  // namespace

void DeviceTimes::begin(std::size_t action, at::Device device) {
  actions_[action].began = timed_event(current_stream(device));
}

void DeviceTimes::end_wait(std::size_t action, at::Device device) {
  actions_[action].end_of_wait = timed_event(current_stream(device));
}

void DeviceTimes::end(std::size_t action, at::Device device) {
  actions_[action].ended = timed_event(current_stream(device));
}

void DeviceTimes::set_transfers(std::size_t action, std::vector<DeviceSpan> transfers, std::int64_t bytes) {
  actions_[action].transfers = std::move(transfers);
  actions_[action].bytes = bytes;
}

void DeviceTimes::resolve(std::vector<ActionRecord>& record, Clock::time_point began) {
  DeviceClocks clocks(began);
  for (std::size_t i = 0; i < std::min(actions_.size(), record.size()); ++i) {
    const ActionEvents& events = actions_[i];
    ActionRecord& action = record[i];
    for (const DeviceSpan& transfer : events.transfers) {
      const std::int64_t start = clocks.time_of(*transfer.began());
      const std::int64_t end = clocks.time_of(*transfer.ended());
      action.transfer_start = action.has_transfer() ? std::min(action.transfer_start, start) : start;
      action.transfer_end = std::max(action.transfer_end, end);
      action.bytes = events.bytes;
    }
    if (!events.began || !events.ended) continue;
    action.start = clocks.time_of(*events.began);
    action.end = clocks.time_of(*events.ended);
    action.waited = events.end_of_wait ? clocks.time_of(*events.end_of_wait) - action.start : 0;
  }
  actions_.clear();
}

}  // namespace penstock::internal
