// For errors: the right word nearest to a wrong one, and all words that there are.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace penstock {

std::string lower_case(std::string_view text);

// The candidate with the fewest letters to change, if that is few enough for a slip; case aside.
std::optional<std::string> nearest(std::string_view word, std::span<const std::string> candidates);

// "ids, mask"; "none" without any.
std::string listed(std::span<const std::string> words);

}  // namespace penstock
