// Starts a thread, or says why there is none.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace penstock::internal {

// Throws std::runtime_error when the system does not allow one more. Who calls this in a constructor joins the threads that
// it has started before the error goes on.
template <class Act>
std::thread start_thread(Act&& act) {
  try {
    return std::thread(std::forward<Act>(act));
  } catch (const std::system_error& error) {
    throw std::runtime_error("a thread cannot be started: " + error.code().message() +
                             ".\n  Hint: `ulimit -u N` allows more threads and processes.");
  }
}

}  // namespace penstock::internal
