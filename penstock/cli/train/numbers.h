// Numbers as people read them.
#pragma once

#include <string>

namespace penstock::cli {

// "0.034", "1.20 k", "34.0 M".
std::string short_number(double number);
// "1:04", minutes and seconds.
std::string clock_text(double seconds);

}  // namespace penstock::cli
