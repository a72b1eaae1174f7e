// Checks of options, with messages that say what would be right.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace penstock::cli {

// From 1 on.
CLI::Validator whole_number();
// From 0 on, of 64 bits.
CLI::Validator seed();
// Not negative.
CLI::Validator cost();
// Requires a number that is not negative, and no larger than the largest float32.
CLI::Validator float_number();
// Requires a path that is not empty.
CLI::Validator path();
// Above 0.
CLI::Validator duration();
// With the nearest right word for a wrong one.
CLI::Validator one_of(std::vector<std::string> words);

}  // namespace penstock::cli
