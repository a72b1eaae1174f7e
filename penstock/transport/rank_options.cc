#include "penstock/transport/rank_options.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

constexpr std::size_t kMostDifferences = 10;

std::string value_in(const RankOptions& options, const std::string& name) {
  const auto found = options.find(name);
  return found == options.end() ? "not given" : found->second;
}

}  // namespace

std::optional<RankOptionsDifference> difference_between(std::span<const RankOptions> by_rank) {
  int first_rank = 0;
  std::vector<std::string> lines;
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    RankOptions names = by_rank.front();
    names.insert(by_rank[rank].begin(), by_rank[rank].end());
    for (const auto& [name, ignored] : names) {
      const std::string expected = value_in(by_rank.front(), name);
      const std::string found = value_in(by_rank[rank], name);
      if (found == expected) continue;
      if (lines.empty()) first_rank = static_cast<int>(rank);
      lines.push_back(concat("\n  ", name, ": ", found, " on rank ", rank, ", ", expected, " on rank 0"));
    }
  }
  if (lines.empty()) return std::nullopt;
  std::string message = "the ranks have different options.";
  for (std::size_t i = 0; i < std::min(lines.size(), kMostDifferences); ++i) message += lines[i];
  if (lines.size() > kMostDifferences) {
    message += concat("\n  … and ", lines.size() - kMostDifferences, " more");
  }
  message += "\n  Hint: start all ranks with the same command line and configuration file.";
  return RankOptionsDifference{.rank = first_rank, .message = std::move(message)};
}

}  // namespace penstock::internal
