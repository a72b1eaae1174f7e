// Parses numbers of the command line.
#pragma once

#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace penstock::internal::cli {

// Returns the number if the whole text is one and the type can represent it, else nullopt.
template <class Number>
std::optional<Number> read_number(std::string_view text) {
  Number number{};
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [last, error] = std::from_chars(begin, end, number);
  return error == std::errc() && last == end ? std::optional(number) : std::nullopt;
}

}  // namespace penstock::internal::cli
