// Ends what must not outlive libtorch when the process exits: threads of objects that are still alive then, on a stack
// that exit() does not unwind, leaked, or static. Operators fail once libtorch's static objects are destroyed, which is in
// the middle of exit().
//
//   class Server {
//     …
//     ExitHook at_exit_{[this] { stop(); }};   // the last member
//   };
#pragma once

#include <functional>

namespace penstock::internal {

// Calls `stop` once when the process exits, unless this was destroyed before. Hooks are called in the reverse order of their
// construction, on the thread that exits, before the static objects that existed when the hook was made are destroyed. In a
// forked child nothing is called: the threads are not there.
class ExitHook {
 public:
  // `stop` neither throws nor waits without a deadline.
  explicit ExitHook(std::function<void()> stop);
  // Waits while `stop` runs on another thread.
  ~ExitHook();
  ExitHook(const ExitHook&) = delete;
  ExitHook& operator=(const ExitHook&) = delete;

  // Moves all hooks before the destruction of static objects that were made meanwhile.
  static void reregister();
  // Returns true from the moment on that hooks are called.
  static bool is_exiting();
  // Returns true on the thread that calls them, or has.
  static bool is_exiting_thread();

 private:
  std::function<void()> stop_;
};

}  // namespace penstock::internal
