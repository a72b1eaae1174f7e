// Formats numbers for people.
#pragma once

#include <string>

namespace penstock::internal::cli {

// Returns a number in three digits with a prefix: "0.034", "1.20 k", "34.0 M".
std::string short_number(double number);
// Returns a size with its unit: "1.20 kB".
std::string bytes_text(double bytes);
// Returns minutes and seconds: "1:04".
std::string clock_text(double seconds);

}  // namespace penstock::internal::cli
