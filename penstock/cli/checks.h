// Checks of options, with messages that say what would be right.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace penstock::cli {

// From 1 on.
CLI::Validator whole_number();
// Not negative.
CLI::Validator cost();
// With the nearest right word for a wrong one.
CLI::Validator one_of(std::vector<std::string> words);

}  // namespace penstock::cli
