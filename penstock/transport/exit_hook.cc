#include "penstock/transport/exit_hook.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include "penstock/base/mutex.h"

namespace penstock::internal {
namespace {

// Waits use std::condition_variable_any, which takes a Mutex; nothing here is on a hot path.
struct Hooks {
  // A leaf lock that is released while a hook runs.
  Mutex mutex;
  // Notified when a hook has returned.
  std::condition_variable_any changed;
  // Not owned: a hook removes its function in its destructor.
  std::vector<const std::function<void()>*> stops PENSTOCK_GUARDED_BY(mutex);
  // The function that runs now, or nullptr.
  const std::function<void()>* running PENSTOCK_GUARDED_BY(mutex) = nullptr;
  // The thread that exits. Written before `exiting` is set.
  std::thread::id exiting_thread;
  std::atomic<bool> exiting = false;
  const pid_t process = ::getpid();
};

// Never destroyed, as hooks may be destroyed after all static objects.
Hooks& hooks() {
  static auto* const kHooks = new Hooks;
  return *kHooks;
}

void call_hooks() {
  Hooks& all = hooks();
  // In a forked child, the mutex may be held by a thread that does not exist there.
  if (::getpid() != all.process) return;
  // Each registration calls this once; other threads read exiting_thread once `exiting` is set.
  if (!all.exiting) {
    all.exiting_thread = std::this_thread::get_id();
    all.exiting = true;
  }
  all.mutex.lock();
  while (!all.stops.empty()) {
    const std::function<void()>* const stop = all.stops.back();
    all.running = stop;
    all.stops.pop_back();
    all.mutex.unlock();
    (*stop)();
    all.mutex.lock();
    all.running = nullptr;
    all.changed.notify_all();
  }
  all.mutex.unlock();
}

}  // namespace

ExitHook::ExitHook(std::function<void()> stop) : stop_(std::move(stop)) {
  Hooks& all = hooks();
  {
    const MutexLock lock(all.mutex);
    all.stops.push_back(&stop_);
  }
  reregister();
}

ExitHook::~ExitHook() {
  Hooks& all = hooks();
  if (::getpid() != all.process) return;
  const MutexLock lock(all.mutex);
  std::erase(all.stops, &stop_);
  while (all.running == &stop_ && !is_exiting_thread()) all.changed.wait(all.mutex);
}

void ExitHook::reregister() {
  // Functions that are registered last are called first. Registration fails only for lack of memory, or during exit.
  std::atexit(call_hooks);
}

bool ExitHook::is_exiting() {
  return hooks().exiting;
}

bool ExitHook::is_exiting_thread() {
  return hooks().exiting && hooks().exiting_thread == std::this_thread::get_id();
}

}  // namespace penstock::internal
