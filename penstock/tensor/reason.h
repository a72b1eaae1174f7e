// The messages of exceptions, with and without libtorch's source locations.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>

namespace penstock::internal {

// Returns the message of an exception, without libtorch's backtrace.
inline std::string reason_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "there is not enough memory.";
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
}

// Returns the first sentence of the message, without the source location that gloo or libtorch puts in front.
inline std::string brief_reason_of(const std::exception& error) {
  std::string text = reason_of(error);
  if (text.starts_with("[") && text.find("] ") != std::string::npos) text.erase(0, text.find("] ") + 2);
  // gloo's messages begin with the condition that failed.
  constexpr const char* kCondition = "false. ";
  if (text.starts_with(kCondition)) text.erase(0, std::char_traits<char>::length(kCondition));
  return text.substr(0, std::min(text.find(". "), text.find('\n')));
}

}  // namespace penstock::internal
