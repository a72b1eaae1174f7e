// A thread that continues in CPU memory what begins on a device: it calls functions in order, each when the devices have
// reached a point, such as the end of a copy to pinned memory. So the rank's thread never waits for a device.
#pragma once

#include <chrono>
#include <deque>
#include <exception>
#include <functional>
#include <thread>

#include "penstock/device/streams.h"
#include "penstock/transport/monitor.h"

namespace penstock::internal {

// One thread calls add() and stop(); any thread calls throw_if_failed().
class StagingThread {
 public:
  // Time after which a wait for a device looks whether it is to end, as a device may never reach a point.
  static constexpr std::chrono::milliseconds kPause{20};

  StagingThread() = default;
  ~StagingThread() { stop(); }
  StagingThread(const StagingThread&) = delete;
  StagingThread& operator=(const StagingThread&) = delete;

  // Returns true if the thread has been started, by the first call of add().
  bool has_started() const { return thread_.joinable(); }
  // Calls the function when `ready` is reached and all functions that were added before have returned. Throws what such
  // a function has thrown.
  void add(StreamPoint ready, std::function<void()> function) PENSTOCK_EXCLUDES(monitor_);
  // Throws what a function has thrown, or a wait for its device. Later functions are not called.
  void throw_if_failed() PENSTOCK_EXCLUDES(monitor_);
  // Joins the thread, without calling what it has not begun.
  void stop() PENSTOCK_EXCLUDES(monitor_);

 private:
  struct Item {
    StreamPoint ready;
    std::function<void()> function;
  };

  void run() PENSTOCK_EXCLUDES(monitor_);
  // Calls the function of an item when its point is reached, unless the thread is to end before.
  void run(const Item& item) PENSTOCK_EXCLUDES(monitor_);

  // Protects what the threads share. A leaf lock: functions are called without it.
  Monitor monitor_{Clock::duration::zero()};
  std::deque<Item> items_ PENSTOCK_GUARDED_BY(monitor_);
  bool is_busy_ PENSTOCK_GUARDED_BY(monitor_) = false;
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  std::exception_ptr error_ PENSTOCK_GUARDED_BY(monitor_);
  // The last member, as the thread uses all of the above.
  std::thread thread_;
};

}  // namespace penstock::internal
