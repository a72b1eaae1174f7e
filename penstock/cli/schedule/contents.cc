#include "penstock/cli/schedule/contents.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iomanip>
#include <map>
#include <ostream>

#include "penstock/base/text.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"

namespace penstock::internal::cli {

Schedule lowered(const Schedule& schedule) {
  if (!features_of(schedule).communication) return lower(schedule);
  require_valid(schedule);
  return schedule;
}

std::size_t count_computations(const Schedule& schedule) {
  std::size_t count = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      if (action.is_compute()) count += action.is_overlap() ? 2 : 1;
    }
  }
  return count;
}

std::size_t count_messages(const Schedule& schedule) {
  std::size_t count = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    count += static_cast<std::size_t>(std::ranges::count_if(schedule.actions(rank), &Action::is_send));
  }
  return count;
}

std::string contents_text(const Schedule& schedule) {
  return size_text(schedule) + ", " + counted(count_computations(schedule), "computation") + ", " +
         counted(count_messages(schedule), "message");
}

std::vector<std::string> problems_in_torch(const Schedule& schedule) {
  // The first action of each kind.
  std::map<std::string, std::string> refused;
  std::string off_chain;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      const std::string text = to_string(action);
      if (action.computation == Computation::Recompute) refused.emplace("recomputations", text);
      if (action.computation == Computation::SumShared) refused.emplace("sums of shared parameters", text);
      if (off_chain.empty() && text.find('@') != std::string::npos) off_chain = text;
    }
  }
  std::vector<std::string> problems;
  for (const auto& [what, text] : refused) {
    problems.push_back(concat("refuses this file: it does not know ", what, " (", text, ")"));
  }
  // It ignores what follows the microbatch.
  if (!off_chain.empty()) {
    problems.push_back(concat("misreads this file: it does not know messages off the chain (", off_chain, ")"));
  }
  return problems;
}

void write_columns(std::ostream& out, const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      out << (i == 0 ? "" : "  ") << (i == 0 ? std::left : std::right) << std::setw(static_cast<int>(widths[i]))
          << row[i];
    }
    out << "\n";
  }
}

std::string rounded(double value, int digits) {
  std::array<char, 64> text;
  const int length = std::snprintf(text.data(), text.size(), "%.*f", digits, value);
  return {text.data(), static_cast<std::size_t>(std::clamp(length, 0, static_cast<int>(text.size()) - 1))};
}

}  // namespace penstock::internal::cli
