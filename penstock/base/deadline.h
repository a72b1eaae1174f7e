// Deadlines of waits. Every wait in Penstock has one.
#pragma once

#include <algorithm>
#include <chrono>

namespace penstock {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Longest timeout: one year. A longer one could not be added to the clock's time without overflow.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

// Returns the timeout itself, no longer than kForever and not negative.
constexpr std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::clamp(timeout, std::chrono::milliseconds::zero(), kForever);
}

// Returns the time `timeout` from now. Any timeout is valid, milliseconds::max() included.
inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  return Clock::now() + bounded(timeout);
}

}  // namespace penstock
