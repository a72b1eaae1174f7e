// Sizes in bytes as people write them: "512MiB", "2GB".
#pragma once

#include <optional>
#include <string_view>

namespace penstock::cli {

// Returns how many bytes a unit has: B, kB, MB, GB, TB, KiB, MiB, GiB or TiB. None for another.
std::optional<double> bytes_of_unit(std::string_view unit);

// Returns the bytes of a number above 0 with its unit; none for anything else.
std::optional<double> parse_bytes(std::string_view text);

}  // namespace penstock::cli
