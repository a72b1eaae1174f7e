// Alarms end waits that cannot keep a deadline themselves: at its deadline, or when all is over, an alarm rings, which
// does whatever wakes the waiter. One thread looks after all of them.
//
//   {
//     const Alarms::Alarm alarm(alarms, deadline, [&] { work->abort(); });
//     work->wait();      // returns early when the alarm has rung
//   }
#pragma once

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/transport/gate.h"
#include "penstock/transport/start_thread.h"

namespace penstock::internal {

class Alarms {
 public:
  Alarms() : thread_(start_thread([this] { watch(); })) {}
  ~Alarms() {
    {
      const Gate::Lock lock = gate_.lock();
      ending_ = true;
      gate_.changed();
    }
    thread_.join();
  }
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;

  // Rings once, from its construction to its destruction, which waits while it rings. `ring` neither blocks nor makes
  // or destroys alarms.
  class Alarm {
   public:
    Alarm(Alarms& alarms, Deadline deadline, std::function<void()> ring)
        : alarms_(&alarms), deadline_(deadline), ring_(std::move(ring)) {
      alarms_->add(*this);
    }
    ~Alarm() { alarms_->remove(*this); }
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;

   private:
    friend class Alarms;
    Alarms* alarms_;
    Deadline deadline_;
    std::function<void()> ring_;
  };

  // Rings all alarms, now, and those to come at once.
  void close() {
    const Gate::Lock lock = gate_.lock();
    closed_ = true;
    for (const Alarm* alarm : set_) alarm->ring_();
    set_.clear();
  }

 private:
  void add(Alarm& alarm) {
    const Gate::Lock lock = gate_.lock();
    if (closed_) {
      alarm.ring_();
      return;
    }
    set_.push_back(&alarm);
    // Most deadlines are as far away as the last one was, so that the thread is rarely woken.
    if (alarm.deadline_ < wakes_at_) {
      wakes_at_ = alarm.deadline_;
      gate_.changed();
    }
  }

  void remove(const Alarm& alarm) {
    const Gate::Lock lock = gate_.lock();
    std::erase(set_, &alarm);
  }

  void watch() {
    Gate::Lock lock = gate_.lock();
    while (!ending_) {
      const Deadline until = wakes_at_;
      if (gate_.wait(lock, until, [&] { return ending_ || wakes_at_ < until; }) != Waited::Late) continue;
      const Deadline now = Clock::now();
      std::erase_if(set_, [now](const Alarm* alarm) {
        if (alarm->deadline_ > now) return false;
        alarm->ring_();
        return true;
      });
      wakes_at_ = Deadline::max();
      for (const Alarm* alarm : set_) wakes_at_ = std::min(wakes_at_, alarm->deadline_);
    }
  }

  Gate gate_{Clock::duration::zero()};
  bool ending_ = false;
  bool closed_ = false;
  Deadline wakes_at_ = Deadline::max();
  std::vector<Alarm*> set_;
  // Last, as it uses all of the above.
  std::thread thread_;
};

}  // namespace penstock::internal
