// Suggests the right word for a mistyped one, for the hints of errors.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace penstock::internal {

// Returns the text with its ASCII letters in lower case.
std::string lower_case(std::string_view text);

// Returns the candidate with the smallest edit distance to the word, ignoring case; none if no candidate is close
// enough to be a typing error.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

}  // namespace penstock::internal
