// A Monitor is a mutex with one condition, for threads that wait for each other for microseconds: a waiter first spins
// for a while and sleeps only then. Every wait has a deadline, and closing the monitor ends all of them.
//
//   class Flag {
//    public:
//     void set() {
//       const MonitorLock lock(monitor_);
//       is_set_ = true;
//       monitor_.notify_all();
//     }
//     WaitResult wait(Deadline deadline) {
//       const MonitorLock lock(monitor_);
//       return monitor_.wait(deadline, [this]() PENSTOCK_REQUIRES(monitor_) { return is_set_; });
//     }
//
//    private:
//     Monitor monitor_{std::chrono::microseconds(50)};
//     bool is_set_ PENSTOCK_GUARDED_BY(monitor_) = false;
//   };
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "penstock/base/deadline.h"
#include "penstock/base/mutex.h"

namespace penstock::internal {

enum class WaitResult {
  // The condition holds.
  Ready,
  // The deadline passed before the condition held.
  Timeout,
  // The monitor was closed before the condition held.
  Closed,
};

// A capability of Clang's thread-safety analysis: declare what it protects with PENSTOCK_GUARDED_BY, and annotate the
// predicates of its waits with PENSTOCK_REQUIRES.
class PENSTOCK_CAPABILITY("monitor") Monitor {
 public:
  // A waiter spins for `spin_time` before it sleeps. Pass zero where there are more threads than cores: a spinning
  // waiter would keep its core from the thread that it waits for.
  explicit Monitor(Clock::duration spin_time) : spin_time_(spin_time) {}
  ~Monitor() = default;
  Monitor(const Monitor&) = delete;
  Monitor& operator=(const Monitor&) = delete;

  // Prefer MonitorLock.
  void lock() PENSTOCK_ACQUIRE() { mutex_.lock(); }
  void unlock() PENSTOCK_RELEASE() { mutex_.unlock(); }
  bool try_lock() PENSTOCK_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

  // Blocks until ready() returns true, the deadline passes or the monitor is closed. Calls ready() with the monitor
  // locked and releases it while it waits. A condition that holds is Ready even if the monitor is closed or the
  // deadline is past.
  //
  // The analysis cannot connect the capability that `ready` requires with this object, so the body is exempt from it.
  template <class Ready>
  WaitResult wait(Deadline deadline, const Ready& ready) PENSTOCK_REQUIRES(this) PENSTOCK_NO_THREAD_SAFETY_ANALYSIS {
    HeldMutex held(mutex_);
    const Deadline spin_until = std::min(deadline, Clock::now() + spin_time_);
    while (!closed_ && !ready()) {
      if (Clock::now() < spin_until) {
        const std::uint64_t seen = changes_.load(std::memory_order_relaxed);
        held.lock.unlock();
        while (changes_.load(std::memory_order_acquire) == seen && Clock::now() < spin_until) pause();
        held.lock.lock();
        continue;
      }
      ++sleepers_;
      const std::cv_status status = condition_.wait_until(held.lock, deadline);
      --sleepers_;
      if (status == std::cv_status::timeout && !closed_ && !ready()) return WaitResult::Timeout;
    }
    return ready() ? WaitResult::Ready : WaitResult::Closed;
  }

  // Wakes all waiters, which evaluate their conditions again. Call it after each change that a condition depends on,
  // before the monitor is unlocked.
  void notify_all() PENSTOCK_REQUIRES(this) {
    changes_.fetch_add(1, std::memory_order_release);
    if (sleepers_ > 0) condition_.notify_all();
  }

  // Ends all current and future waits whose condition does not hold.
  void close() PENSTOCK_EXCLUDES(this) {
    lock();
    closed_ = true;
    notify_all();
    unlock();
  }

 private:
  // Lends the mutex, which the caller of wait() has locked, to std::condition_variable, and leaves it locked.
  struct HeldMutex {
    explicit HeldMutex(std::mutex& mutex) : lock(mutex, std::adopt_lock) {}
    ~HeldMutex() { lock.release(); }
    HeldMutex(const HeldMutex&) = delete;
    HeldMutex& operator=(const HeldMutex&) = delete;

    std::unique_lock<std::mutex> lock;
  };

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  const Clock::duration spin_time_;
  std::mutex mutex_;
  std::condition_variable condition_;
  // Counts the calls of notify_all. Spinning waiters read it without the mutex.
  std::atomic<std::uint64_t> changes_ = 0;
  // Number of waiters that sleep, so that notify_all makes a system call only if there are any.
  int sleepers_ PENSTOCK_GUARDED_BY(this) = 0;
  bool closed_ PENSTOCK_GUARDED_BY(this) = false;
};

// Holds a monitor for as long as it lives, except between unlock() and lock().
class PENSTOCK_SCOPED_CAPABILITY MonitorLock {
 public:
  explicit MonitorLock(Monitor& monitor) PENSTOCK_ACQUIRE(monitor) : monitor_(monitor) { monitor_.lock(); }
  ~MonitorLock() PENSTOCK_RELEASE() {
    if (is_held_) monitor_.unlock();
  }
  MonitorLock(const MonitorLock&) = delete;
  MonitorLock& operator=(const MonitorLock&) = delete;

  void lock() PENSTOCK_ACQUIRE() {
    monitor_.lock();
    is_held_ = true;
  }
  void unlock() PENSTOCK_RELEASE() {
    is_held_ = false;
    monitor_.unlock();
  }

 private:
  Monitor& monitor_;
  bool is_held_ = true;
};

}  // namespace penstock::internal
