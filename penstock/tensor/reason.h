// What an error says, of libtorch or not.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace penstock {

// Without where in libtorch it came from.
inline std::string reason_of(const std::exception& error) {
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
}

}  // namespace penstock
