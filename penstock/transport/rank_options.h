// Compares the options that the ranks of a run were started with.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>

namespace penstock::internal {

// Values by name, as text.
using RankOptions = std::map<std::string, std::string>;

struct RankOptionsDifference {
  // The first rank whose options differ from those of rank 0.
  int rank = 0;
  // Lists at most ten differences of all ranks, and ends with a hint.
  std::string message;
};

// Compares the options of all ranks, which are given in the order of ranks. Returns nullopt if they are the same.
std::optional<RankOptionsDifference> difference_between(std::span<const RankOptions> by_rank);

}  // namespace penstock::internal
