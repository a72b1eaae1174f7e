// What an error says, of libtorch or not.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <new>
#include <string>

namespace penstock::internal {

// Without where in libtorch it came from.
inline std::string reason_of(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return "there is not enough memory.";
  const auto* from_torch = dynamic_cast<const c10::Error*>(&error);
  return from_torch == nullptr ? error.what() : from_torch->what_without_backtrace();
}

// The first sentence of it, without where in gloo or libtorch it was thrown.
inline std::string brief_reason_of(const std::exception& error) {
  std::string text = reason_of(error);
  if (text.starts_with("[") && text.find("] ") != std::string::npos) text.erase(0, text.find("] ") + 2);
  // gloo tells the condition first.
  constexpr const char* kCondition = "false. ";
  if (text.starts_with(kCondition)) text.erase(0, std::char_traits<char>::length(kCondition));
  return text.substr(0, std::min(text.find(". "), text.find('\n')));
}

}  // namespace penstock::internal
