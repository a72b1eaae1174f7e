// Parses sizes in bytes, such as "512MiB" and "2GB".
#pragma once

#include <optional>
#include <string_view>

namespace penstock::internal::cli {

// Returns the size that a number above 0 with a unit (B, kB, MB, GB, TB, KiB, MiB, GiB or TiB) stands for, and nullopt
// for any other text.
std::optional<double> parse_bytes(std::string_view text);

}  // namespace penstock::internal::cli
