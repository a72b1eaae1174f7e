// The exception of the schedule layer.
#pragma once

#include <stdexcept>

namespace penstock {

// Thrown for bad input to the schedule layer: a text that is not an action, a file that is not a schedule, a schedule
// that cannot run. The message says what was found, where, and what would be right; it may have several lines.
class ScheduleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock
