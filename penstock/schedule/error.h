// What the schedule room throws.
#pragma once

#include <stdexcept>

namespace penstock {

// Bad input to the schedule room: a text that is no action, a file that is no schedule, a schedule that cannot run.
// The message says what was found, where, and what would be right; it may have several lines.
class ScheduleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace penstock
