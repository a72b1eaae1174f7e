// A mutex that Clang's thread-safety analysis understands. Declare what it protects where it is declared, and the order
// in which locks are acquired; `make lint` fails on an access without the lock.
//
//   class Counter {
//    public:
//     void add() {
//       const MutexLock lock(mutex_);
//       ++count_;
//     }
//
//    private:
//     Mutex mutex_;
//     int count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
//   };
//
// Wait on a condition with std::condition_variable_any, which takes a Mutex, in a loop that reads its predicate under
// the lock: the analysis does not see that a predicate passed as a lambda holds it.
#pragma once

#include <mutex>

#if defined(__clang__)
#define PENSTOCK_THREAD_ANNOTATION(attribute) __attribute__((attribute))
#else
#define PENSTOCK_THREAD_ANNOTATION(attribute)
#endif

#define PENSTOCK_CAPABILITY(name) PENSTOCK_THREAD_ANNOTATION(capability(name))
#define PENSTOCK_SCOPED_CAPABILITY PENSTOCK_THREAD_ANNOTATION(scoped_lockable)
#define PENSTOCK_GUARDED_BY(mutex) PENSTOCK_THREAD_ANNOTATION(guarded_by(mutex))
#define PENSTOCK_PT_GUARDED_BY(mutex) PENSTOCK_THREAD_ANNOTATION(pt_guarded_by(mutex))
#define PENSTOCK_ACQUIRED_BEFORE(...) PENSTOCK_THREAD_ANNOTATION(acquired_before(__VA_ARGS__))
#define PENSTOCK_ACQUIRED_AFTER(...) PENSTOCK_THREAD_ANNOTATION(acquired_after(__VA_ARGS__))
#define PENSTOCK_REQUIRES(...) PENSTOCK_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define PENSTOCK_EXCLUDES(...) PENSTOCK_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define PENSTOCK_ACQUIRE(...) PENSTOCK_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define PENSTOCK_RELEASE(...) PENSTOCK_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define PENSTOCK_TRY_ACQUIRE(...) PENSTOCK_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define PENSTOCK_NO_THREAD_SAFETY_ANALYSIS PENSTOCK_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace penstock::internal {

class PENSTOCK_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  ~Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() PENSTOCK_ACQUIRE() { mutex_.lock(); }
  void unlock() PENSTOCK_RELEASE() { mutex_.unlock(); }
  bool try_lock() PENSTOCK_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  std::mutex mutex_;
};

// Holds a mutex for as long as it lives.
class PENSTOCK_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) PENSTOCK_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() PENSTOCK_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace penstock::internal
