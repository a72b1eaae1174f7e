// Ends waits that cannot observe a deadline themselves, such as c10d::Work::wait. An alarm calls a function that wakes
// the waiter, at its deadline or when the timer is closed. One thread serves all alarms.
//
//   {
//     const DeadlineTimer::Alarm alarm(timer, deadline, [&] { work->abort(); });
//     work->wait();      // returns early if the alarm has fired
//   }
#pragma once

#include <algorithm>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/transport/monitor.h"
#include "penstock/transport/start_thread.h"

namespace penstock::internal {

// Thread-safe. Destroy all alarms before their timer.
class DeadlineTimer {
 public:
  // Starts the timer's thread. Throws std::runtime_error if the system does not allow one more thread.
  DeadlineTimer() : thread_(start_thread([this] { serve(); })) {}
  ~DeadlineTimer() {
    {
      const MonitorLock lock(monitor_);
      ending_ = true;
      monitor_.notify_all();
    }
    thread_.join();
  }
  DeadlineTimer(const DeadlineTimer&) = delete;
  DeadlineTimer& operator=(const DeadlineTimer&) = delete;

  // Calls `on_fire` at most once, at the deadline, at close(), or at once if the timer is closed already. The
  // destructor cancels the alarm, and blocks while `on_fire` runs on another thread. `on_fire` is called with the
  // timer's lock held, so it must neither block nor construct or destroy alarms of this timer.
  class Alarm {
   public:
    Alarm(DeadlineTimer& timer, Deadline deadline, std::function<void()> on_fire)
        : timer_(timer), deadline_(deadline), on_fire_(std::move(on_fire)) {
      timer_.add(*this);
    }
    ~Alarm() { timer_.remove(*this); }
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;

   private:
    friend class DeadlineTimer;
    DeadlineTimer& timer_;
    const Deadline deadline_;
    const std::function<void()> on_fire_;
  };

  // Fires all alarms, and later ones as soon as they are constructed.
  void close() PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    closed_ = true;
    for (const Alarm* alarm : pending_) alarm->on_fire_();
    pending_.clear();
  }

 private:
  void add(const Alarm& alarm) PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    if (closed_) {
      alarm.on_fire_();
      return;
    }
    pending_.push_back(&alarm);
    // Deadlines mostly grow from wait to wait, so the thread is rarely woken here.
    if (alarm.deadline_ < wake_time_) {
      wake_time_ = alarm.deadline_;
      monitor_.notify_all();
    }
  }

  void remove(const Alarm& alarm) PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    std::erase(pending_, &alarm);
  }

  void serve() PENSTOCK_EXCLUDES(monitor_) {
    const MonitorLock lock(monitor_);
    while (!ending_) {
      const Deadline until = wake_time_;
      const WaitResult result =
          monitor_.wait(until, [this, until]() PENSTOCK_REQUIRES(monitor_) { return ending_ || wake_time_ < until; });
      if (result != WaitResult::Timeout) continue;
      const Deadline now = Clock::now();
      std::erase_if(pending_, [now](const Alarm* alarm) {
        if (alarm->deadline_ > now) return false;
        alarm->on_fire_();
        return true;
      });
      wake_time_ = Deadline::max();
      for (const Alarm* alarm : pending_) wake_time_ = std::min(wake_time_, alarm->deadline_);
    }
  }

  // A leaf lock with respect to Penstock's own: `on_fire` functions acquire no other.
  Monitor monitor_{Clock::duration::zero()};
  bool ending_ PENSTOCK_GUARDED_BY(monitor_) = false;
  bool closed_ PENSTOCK_GUARDED_BY(monitor_) = false;
  // The time at which the thread wakes up: the earliest deadline, or earlier if that alarm has been destroyed.
  Deadline wake_time_ PENSTOCK_GUARDED_BY(monitor_) = Deadline::max();
  // Not owned: an alarm removes itself in its destructor.
  std::vector<const Alarm*> pending_ PENSTOCK_GUARDED_BY(monitor_);
  // The last member, as the thread uses all of the above.
  std::thread thread_;
};

}  // namespace penstock::internal
