// Sizes in bytes as people write them: "512MiB", "2GB".
#pragma once

#include <optional>
#include <string_view>

namespace penstock::cli {

// Returns the bytes of a number above 0 with its unit: B, kB, MB, GB, TB, KiB, MiB, GiB or TiB. None for anything else.
std::optional<double> parse_bytes(std::string_view text);

}  // namespace penstock::cli
