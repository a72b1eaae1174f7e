// Catches what a call throws, so that a test can compare its message.
#pragma once

#include <exception>
#include <string>

namespace penstock::internal::testing {

// Returns the message of the Error that a call throws. Any other exception passes through.
template <class Error = std::exception, class Act>
std::string message_of(const Act& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace penstock::internal::testing
