// When a rank's actions ran on its devices. A host that only appends work to streams cannot tell: events in the streams
// can, and are read when somebody asks for the record of the step.
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
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

  // Called where the action begins, where a computation has all that it waited for, and where the action has ended.
  void begin(std::size_t action, at::Device device);
  void end_wait(std::size_t action, at::Device device);
  void end(std::size_t action, at::Device device);
  // Takes the spans of the transfers of a send's or a receive's message, and its bytes.
  void set_transfers(std::size_t action, std::vector<DeviceSpan> transfers, std::int64_t bytes);

  // Returns the event at which the device has ended the action.
  const TimedEvent& end_of(std::size_t action) const { return actions_[action].ended; }

  // Replaces the host's times of the actions on devices by the devices' times since `began`, and forgets the events.
  // Waits for the devices if they have not reached the events, and otherwise at most once in ten seconds.
  void resolve(std::vector<ActionRecord>& record, Clock::time_point began);

 private:
  struct ActionEvents {
    TimedEvent began;
    TimedEvent end_of_wait;
    TimedEvent ended;
    std::vector<DeviceSpan> transfers;
    std::int64_t bytes = 0;
  };
  std::vector<ActionEvents> actions_;
};

}  // namespace penstock::internal
