#include "penstock/cli/byte_units.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>

namespace penstock::internal::cli {
namespace {

std::optional<double> bytes_of_unit(std::string_view unit) {
  struct Unit {
    std::string_view name;
    double bytes;
  };
  static constexpr std::array<Unit, 9> kUnits{{{"B", 1},
                                               {"kB", 1e3},
                                               {"MB", 1e6},
                                               {"GB", 1e9},
                                               {"TB", 1e12},
                                               {"KiB", 1024.0},
                                               {"MiB", 1048576.0},
                                               {"GiB", 1073741824.0},
                                               {"TiB", 1099511627776.0}}};
  const auto* const known = std::ranges::find(kUnits, unit, &Unit::name);
  return known == kUnits.end() ? std::nullopt : std::optional(known->bytes);
}

}  // namespace

std::optional<double> parse_bytes(std::string_view text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto read = std::from_chars(text.data(), end, number);
  const std::optional<double> unit = bytes_of_unit(text.substr(static_cast<std::size_t>(read.ptr - text.data())));
  const bool is_good = read.ec == std::errc() && std::isfinite(number) && number > 0 && unit;
  return is_good ? std::optional(number * *unit) : std::nullopt;
}

}  // namespace penstock::internal::cli
