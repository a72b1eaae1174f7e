// Stops threads that must not outlive libtorch when the process exits. Their owners may still be alive then: on a stack
// that exit() does not unwind, leaked, or static. Operators fail once libtorch's static objects are destroyed, which
// happens in the middle of exit().
//
//   class Server {
//     …
//     ExitHook exit_hook_{[this] { stop(); }};   // the last member
//   };
#pragma once

#include <functional>

namespace penstock::internal {

// Calls `stop` once when the process exits, unless the hook was destroyed before. Hooks are called in the reverse order
// of their construction, on the thread that exits, before static objects that existed when the hook was constructed are
// destroyed. A forked child calls no hooks, as it does not have the threads. Thread-safe.
class ExitHook {
 public:
  // `stop` must not throw, and must not wait without a deadline.
  explicit ExitHook(std::function<void()> stop);
  // Blocks while `stop` runs on another thread.
  ~ExitHook();
  ExitHook(const ExitHook&) = delete;
  ExitHook& operator=(const ExitHook&) = delete;

  // Registers the hooks with std::atexit again, so that they run before static objects that were constructed since the
  // previous registration are destroyed.
  static void reregister();
  // Returns true once hooks are being called.
  static bool is_exiting();
  // Returns true on the thread that calls the hooks.
  static bool is_exiting_thread();

 private:
  std::function<void()> stop_;
};

}  // namespace penstock::internal
