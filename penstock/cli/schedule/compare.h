// penstock schedule compare.
#pragma once

#include <CLI/CLI.hpp>

namespace penstock::internal::cli {

// Adds `compare` to `penstock schedule`.
void add_compare(CLI::App& parent);

}  // namespace penstock::internal::cli
