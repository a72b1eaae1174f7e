#include "penstock/schedule/source.h"

#include <algorithm>

#include "penstock/base/text.h"
#include "penstock/schedule/schedule.h"

namespace penstock {

using internal::concat;

std::optional<std::string> ScheduleSource::place_of(int rank, const Action& action, std::size_t count) const {
  const Row& row = rows_.at(static_cast<std::size_t>(rank));
  const Cell* found = nullptr;
  for (const Cell& cell : row.cells) {
    if (cell.action != action) continue;
    found = &cell;
    if (count-- == 0) break;
  }
  // A pass may have split a pair.
  for (std::size_t i = 0; found == nullptr && i < row.cells.size(); ++i) {
    for_each_part(row.cells[i].action, [&](const Action& part) {
      if (part == action) found = &row.cells[i];
    });
  }
  if (found == nullptr) return std::nullopt;
  return concat(line_of(rank), ":", found->column);
}

std::string ScheduleSource::line_of(int rank) const {
  return concat(file_, ":", rows_.at(static_cast<std::size_t>(rank)).line);
}

std::string place_text(const Schedule& schedule, int rank, std::size_t position) {
  const auto actions = schedule.actions(rank);
  if (schedule.source() != nullptr && position < actions.size()) {
    const auto before = actions.first(position);
    const auto count = static_cast<std::size_t>(std::ranges::count(before, actions[position]));
    if (const auto place = schedule.source()->place_of(rank, actions[position], count)) return *place;
  }
  return concat("position ", position);
}

}  // namespace penstock
