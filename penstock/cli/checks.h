// Validators of option values. Their messages say what was found and what is expected.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace penstock::internal::cli {

// Requires a whole number from 1 on.
CLI::Validator whole_number();
// Requires an unsigned 64-bit number.
CLI::Validator seed();
// Requires a finite number that is not negative.
CLI::Validator cost();
// Requires a number that is not negative, and no larger than the largest float32.
CLI::Validator float_number();
// Requires a size in bytes above 0 with a unit, as parse_bytes() takes it.
CLI::Validator size_in_bytes();
// Requires a path that is not empty.
CLI::Validator path();
// Requires a finite number above 0.
CLI::Validator duration();
// Requires one of these words. The message for another word suggests the nearest of them.
CLI::Validator one_of(std::vector<std::string> words);

}  // namespace penstock::internal::cli
