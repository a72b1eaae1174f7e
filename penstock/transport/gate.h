// A Gate is a mutex with a condition, for threads that wait for one another for microseconds: a waiter first looks for a
// while without giving up its core, and sleeps only then. Every wait has a deadline, and a closed gate ends all of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "penstock/base/deadline.h"

namespace penstock::internal {

enum class Waited { Ready, Late, Closed };

class Gate {
 public:
  // How long a waiter stays awake; none where there are more threads than cores, as it would keep a core from who is
  // waited for.
  explicit Gate(Clock::duration awake) : awake_(awake) {}

  using Lock = std::unique_lock<std::mutex>;
  Lock lock() { return Lock(mutex_); }

  // Waits until ready() holds, which is asked under the lock. Returns with the lock held.
  template <class Ready>
  Waited wait(Lock& lock, Deadline deadline, const Ready& ready) {
    const Deadline awake_until = std::min(deadline, Clock::now() + awake_);
    while (!closed_ && !ready()) {
      if (Clock::now() < awake_until) {
        const std::uint64_t seen = changes_.load(std::memory_order_relaxed);
        lock.unlock();
        while (changes_.load(std::memory_order_acquire) == seen && Clock::now() < awake_until) pause();
        lock.lock();
        continue;
      }
      ++sleepers_;
      const std::cv_status status = condition_.wait_until(lock, deadline);
      --sleepers_;
      if (status == std::cv_status::timeout && !closed_ && !ready()) return Waited::Late;
    }
    // What is there is taken, also from a closed gate.
    return ready() ? Waited::Ready : Waited::Closed;
  }

  // Tells the waiters, under the lock, that something has changed.
  void changed() {
    changes_.fetch_add(1, std::memory_order_release);
    if (sleepers_ > 0) condition_.notify_all();
  }

  void close() {
    const Lock guard = lock();
    closed_ = true;
    changed();
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  const Clock::duration awake_;
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<std::uint64_t> changes_ = 0;
  int sleepers_ = 0;
  bool closed_ = false;
};

}  // namespace penstock::internal
