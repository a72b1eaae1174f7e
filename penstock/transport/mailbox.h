// A Mailbox is where one thread takes what others have put there, by key. A value is put in once its taker has opened
// the key, so that there is never more than was asked for.
//
//   Mailbox<int> box(/*awake=*/30us);
//   box.open(7);                    // the taker
//   box.put(7, 42, deadline);       // another thread
//   box.take(7, value, deadline);   // the taker again
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

#include "penstock/transport/gate.h"

namespace penstock::internal {

template <class Value>
class Mailbox {
 public:
  using Key = std::uint64_t;

  explicit Mailbox(Clock::duration awake) : gate_(awake) {}

  // One value of this key will be taken. Values of one key are taken in the order in which they were put in.
  void open(Key key) {
    const Gate::Lock lock = gate_.lock();
    ++slots_[key].opened;
    gate_.changed();
  }

  // Waits until the key is open.
  Waited put(Key key, Value value, Deadline deadline) {
    Gate::Lock lock = gate_.lock();
    const Waited waited = gate_.wait(lock, deadline, [&] {
      const auto slot = slots_.find(key);
      return slot != slots_.end() && slot->second.opened > 0;
    });
    if (waited != Waited::Ready) return waited;
    Slot& slot = slots_[key];
    --slot.opened;
    slot.values.push_back(std::move(value));
    gate_.changed();
    return waited;
  }

  // Waits until there is a value.
  Waited take(Key key, Value& value, Deadline deadline) {
    Gate::Lock lock = gate_.lock();
    const Waited waited = gate_.wait(lock, deadline, [&] {
      const auto slot = slots_.find(key);
      return slot != slots_.end() && !slot->second.values.empty();
    });
    if (waited != Waited::Ready) return waited;
    const auto found = slots_.find(key);
    Slot& slot = found->second;
    value = std::move(slot.values.front());
    slot.values.pop_front();
    if (slot.opened == 0 && slot.values.empty()) slots_.erase(found);
    return waited;
  }

  // Ends all waiting, now and later.
  void close() { gate_.close(); }

 private:
  struct Slot {
    int opened = 0;
    std::deque<Value> values;
  };

  Gate gate_;
  std::unordered_map<Key, Slot> slots_;
};

}  // namespace penstock::internal
