#include "penstock/transport/exit_hook.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace penstock::internal {
namespace {

struct Hooks {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<const std::function<void()>*> stops;
  // The one that runs, and the thread that exits.
  const std::function<void()>* running = nullptr;
  std::thread::id runner;
  std::atomic<bool> exiting = false;
  const pid_t process = ::getpid();
};

// Never destroyed: hooks may end after all static objects.
Hooks& hooks() {
  static auto* const kHooks = new Hooks;
  return *kHooks;
}

void call_hooks() {
  Hooks& all = hooks();
  // In a forked child, the mutex may be held by a thread that is not there.
  if (::getpid() != all.process) return;
  std::unique_lock lock(all.mutex);
  all.runner = std::this_thread::get_id();
  all.exiting = true;
  while (!all.stops.empty()) {
    all.running = all.stops.back();
    all.stops.pop_back();
    lock.unlock();
    (*all.running)();
    lock.lock();
    all.running = nullptr;
    all.changed.notify_all();
  }
}

}  // namespace

ExitHook::ExitHook(std::function<void()> stop) : stop_(std::move(stop)) {
  Hooks& all = hooks();
  {
    const std::lock_guard lock(all.mutex);
    all.stops.push_back(&stop_);
  }
  reregister();
}

ExitHook::~ExitHook() {
  Hooks& all = hooks();
  if (::getpid() != all.process) return;
  std::unique_lock lock(all.mutex);
  std::erase(all.stops, &stop_);
  all.changed.wait(lock, [&] { return all.running != &stop_ || all.runner == std::this_thread::get_id(); });
}

void ExitHook::reregister() {
  // Functions that are registered last are called first. It fails only when there is no memory for it, or no time any more.
  std::atexit(call_hooks);
}

bool ExitHook::is_exiting() {
  return hooks().exiting;
}

bool ExitHook::is_exiting_thread() {
  return hooks().exiting && hooks().runner == std::this_thread::get_id();
}

}  // namespace penstock::internal
