// Converts the ints that number stages, nodes and microbatches to indices of containers.
#pragma once

#include <cstddef>

namespace penstock::internal {

// Returns a number that is not negative as an index.
constexpr std::size_t index(int number) {
  return static_cast<std::size_t>(number);
}

}  // namespace penstock::internal
