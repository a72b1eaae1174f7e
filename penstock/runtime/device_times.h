// When a rank's actions ran on its devices. A host that only appends work to streams cannot tell: events in the streams
// can, and are read when somebody asks for the record of the step.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/device_span.h"
#include "penstock/runtime/record.h"

namespace penstock::internal {

// Device events of the actions of one rank. Used by the rank's thread during a step, and by the caller's after it.
class DeviceTimes {
 public:
  // Begins a step of so many actions. They are not on a device unless begin() is called.
  void begin_step(std::size_t actions) { actions_.assign(actions, {}); }

  // Called where the action begins, and where it has ended.
  void begin(std::size_t action, at::Device device);
  void end(std::size_t action, at::Device device);
  // Takes a span in which the action waited for messages. Each part of a pair has one.
  void add_wait(std::size_t action, DeviceSpan wait) { actions_[action].waits.push_back(std::move(wait)); }
  // Takes the spans of the transfers of a send's or a receive's message, and its bytes.
  void set_transfers(std::size_t action, std::vector<DeviceSpan> transfers, std::int64_t bytes);

  // Returns the event at which the device has ended the action.
  const TimedEvent& end_of(std::size_t action) const { return actions_[action].ended; }

  // Replaces the host's times of the actions on devices by the devices' times since `began`, and forgets the events.
  // Waits for the devices if they have not reached the events, and otherwise at most once in ten seconds. Actions that
  // they have not reached at the deadline keep the host's times.
  void resolve(std::vector<ActionRecord>& record, Clock::time_point began, Deadline deadline);

 private:
  struct ActionEvents {
    TimedEvent began;
    TimedEvent ended;
    std::vector<DeviceSpan> waits;
    std::vector<DeviceSpan> transfers;
    std::int64_t bytes = 0;
  };
  std::vector<ActionEvents> actions_;
};

}  // namespace penstock::internal
