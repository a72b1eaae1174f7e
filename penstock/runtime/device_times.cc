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

void DeviceTimes::set_copies(std::size_t action, std::vector<DeviceSpan> copies) {
  actions_[action].copies = std::move(copies);
}

void DeviceTimes::resolve(std::vector<ActionRecord>& record, Clock::time_point began) {
  DeviceClocks clocks(began);
  for (std::size_t i = 0; i < std::min(actions_.size(), record.size()); ++i) {
    const ActionEvents& events = actions_[i];
    if (!events.began || !events.ended) continue;
    ActionRecord& action = record[i];
    action.start = clocks.time_of(*events.began);
    action.end = clocks.time_of(*events.ended);
    action.waited = events.end_of_wait ? clocks.time_of(*events.end_of_wait) - action.start : 0;
    if (events.copies.empty()) continue;
    action.start = clocks.time_of(*events.copies.front().began());
    for (const DeviceSpan& copy : events.copies) {
      action.start = std::min(action.start, clocks.time_of(*copy.began()));
      action.end = std::max(action.end, clocks.time_of(*copy.ended()));
    }
  }
  actions_.clear();
}

}  // namespace penstock::internal
