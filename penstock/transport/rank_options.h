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
  // The first rank whose options are not those of rank 0.
  int rank = 0;
  // Lists what differs on all ranks, at most ten lines of it, and ends with a hint.
  std::string message;
};

// Takes the options of each rank, by rank. Returns nothing if all are the same.
std::optional<RankOptionsDifference> difference_between(std::span<const RankOptions> by_rank);

}  // namespace penstock::internal
