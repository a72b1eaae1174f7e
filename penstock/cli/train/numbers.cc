#include "penstock/cli/train/numbers.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>

namespace penstock::internal::cli {

std::string clock_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(seconds + 0.5);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%lld:%02lld", static_cast<long long>(whole / 60),
                static_cast<long long>(whole % 60));
  return text.data();
}

std::string short_number(double number) {
  constexpr std::array units{"", " k", " M", " G", " T"};
  std::size_t unit = 0;
  for (; number >= 1000 && unit + 1 < units.size(); ++unit) number /= 1000;
  std::array<char, 32> text{};
  // Significant digits below ten, so that a slow run does not show 0 rows/s.
  if (unit == 0 && number < 10 && number != std::round(number)) {
    std::snprintf(text.data(), text.size(), "%.2g", number);
    return text.data();
  }
  std::snprintf(text.data(), text.size(),
                unit == 0 || number >= 100 ? "%.0f%s"
                : number >= 10             ? "%.1f%s"
                                           : "%.2f%s",
                number, units[unit]);
  return text.data();
}

std::string bytes_text(double bytes) {
  return short_number(bytes) + "B";
}

}  // namespace penstock::internal::cli
