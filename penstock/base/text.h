// Builds the texts of errors, tables and names.
//
//   throw PipelineError(concat("rank ", rank, " of ", ranks, " has stages ", join(stages), "."));
#pragma once

#include <concepts>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>

namespace penstock::internal {

// A part of a text: a string, a character or an integer. Floating-point numbers are left out, as the caller has to
// choose their precision.
template <class Part>
concept TextPart = std::convertible_to<const Part&, std::string_view> ||
                   (std::integral<Part> && !std::same_as<std::remove_cv_t<Part>, bool>);

// Appends one part to a text.
template <TextPart Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::convertible_to<const Part&, std::string_view>) {
    text.append(std::string_view(part));
  } else if constexpr (std::same_as<std::remove_cv_t<Part>, char>) {
    text.push_back(part);
  } else {
    text.append(std::to_string(part));
  }
}

// Returns the parts one after the other, integers in decimal.
template <TextPart... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

// Returns the elements of a range with a separator between them: join({1, 2}) is "1, 2". Returns an empty text for an
// empty range.
template <class Range>
std::string join(const Range& range, std::string_view separator = ", ") {
  std::string text;
  bool is_first = true;
  for (const auto& element : range) {
    if (!is_first) text.append(separator);
    is_first = false;
    append(text, element);
  }
  return text;
}

// Like join, but returns "none" for an empty range.
template <class Range>
std::string join_or_none(const Range& range, std::string_view separator = ", ") {
  return std::empty(range) ? "none" : join(range, separator);
}

// Returns a shape or another list of numbers as PyTorch prints it: "[2, 16]".
template <class Range>
std::string shape_text(const Range& sizes) {
  return concat('[', join(sizes), ']');
}

}  // namespace penstock::internal
