// Starts a thread, with a helpful error if the system does not allow one more.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace penstock::internal {

// Throws std::runtime_error if the system does not allow one more thread. A constructor that starts several threads has
// to join those that it has started before it rethrows the error.
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
