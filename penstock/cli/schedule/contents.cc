#include "penstock/cli/schedule/contents.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <iomanip>
#include <map>
#include <ostream>

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

std::vector<std::string> unknown_to_torch(const Schedule& schedule) {
  std::map<std::string, Action> unknown;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      if (action.computation == Computation::Recompute) unknown.emplace("recomputations", action);
      if (action.computation == Computation::SumShared) unknown.emplace("sums of shared parameters", action);
      if (to_string(action).find('@') != std::string::npos) unknown.emplace("messages off the chain", action);
    }
  }
  std::vector<std::string> texts;
  for (const auto& [what, action] : unknown) texts.push_back(what + " (" + to_string(action) + ")");
  return texts;
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
