// A Mailbox passes values between threads of a process, by key. The receiver opens a key once for each value that it is
// going to take, and a sender blocks until the key is open: a mailbox never holds more values than were asked for.
//
//   Mailbox<int> box(/*spin_time=*/30us);
//   box.open(7);                    // the receiver
//   box.put(7, 42, deadline);       // a sender, on another thread
//   box.take(7, value, deadline);   // the receiver
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

#include "penstock/transport/monitor.h"

namespace penstock::internal {

// Thread-safe.
template <class Value>
class Mailbox {
 public:
  using Key = std::uint64_t;

  // Waiting threads spin for `spin_time` before they sleep.
  explicit Mailbox(Clock::duration spin_time) : monitor_(spin_time) {}

  // Allows one more value of this key to be put. Values of one key are taken in the order in which they were put.
  void open(Key key) PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    ++slots_[key].opened;
    monitor_.notify_all();
  }

  // Blocks until the key is open, and then stores the value. Drops the value unless the result is Ready.
  WaitResult put(Key key, Value value, Deadline deadline) PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    const WaitResult result = monitor_.wait(deadline, [this, key]() PENSTOCK_REQUIRES(monitor_) {
      const auto slot = slots_.find(key);
      return slot != slots_.end() && slot->second.opened > 0;
    });
    if (result != WaitResult::Ready) return result;
    Slot& slot = slots_[key];
    --slot.opened;
    slot.values.push_back(std::move(value));
    monitor_.notify_all();
    return result;
  }

  // Blocks until there is a value of this key, and moves it into `value`. Leaves `value` as it is unless the result is
  // Ready.
  WaitResult take(Key key, Value& value, Deadline deadline) PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    const WaitResult result = monitor_.wait(deadline, [this, key]() PENSTOCK_REQUIRES(monitor_) {
      const auto slot = slots_.find(key);
      return slot != slots_.end() && !slot->second.values.empty();
    });
    if (result != WaitResult::Ready) return result;
    const auto found = slots_.find(key);
    Slot& slot = found->second;
    value = std::move(slot.values.front());
    slot.values.pop_front();
    if (slot.opened == 0 && slot.values.empty()) slots_.erase(found);
    return result;
  }

  // Ends all current and future waits. Values that are in the mailbox can still be taken.
  void close() PENSTOCK_EXCLUDES(monitor_) { monitor_.close(); }

 private:
  struct Slot {
    // Number of values that may still be put.
    int opened = 0;
    std::deque<Value> values;
  };

  // A leaf lock: no other is acquired while it is held.
  Monitor monitor_;
  std::unordered_map<Key, Slot> slots_ PENSTOCK_GUARDED_BY(monitor_);
};

}  // namespace penstock::internal
