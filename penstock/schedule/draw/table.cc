#include <algorithm>
#include <string>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/draw.h"

namespace penstock {
namespace {

using internal::concat;

std::string padded(std::string text, std::size_t width) {
  if (text.size() < width) text.append(width - text.size(), ' ');
  return text;
}

// A range of `count` indices out of `total` around `middle`; all of them if count is 0.
struct Window {
  int first;
  int end;
};
Window window_around(int middle, int count, int total) {
  if (count == 0 || count >= total) return {0, total};
  const int first = std::clamp(middle - count / 2, 0, total - count);
  return {first, first + count};
}

}  // namespace

std::string table_of(const Schedule& schedule, const TableOptions& options) {
  int steps = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    steps = std::max(steps, static_cast<int>(schedule.actions(rank).size()));
  }
  // The position after the last action can be marked too.
  steps = std::max(steps, options.mark_position + 1);
  const int most_steps = options.steps_around == 0 ? 0 : 2 * options.steps_around + 1;
  const Window rows = window_around(std::max(options.mark_position, 0), most_steps, steps);
  const Window columns = window_around(std::max(options.mark_rank, 0), options.most_ranks, schedule.ranks());

  const auto cell = [&](int rank, int step) {
    const auto actions = schedule.actions(rank);
    const bool marked = rank == options.mark_rank && step == options.mark_position;
    std::string text =
        step < static_cast<int>(actions.size()) ? to_string(actions[static_cast<std::size_t>(step)]) : "";
    return marked ? "[" + text + "]" : text;
  };
  std::vector<std::size_t> widths;
  for (int rank = columns.first; rank < columns.end; ++rank) {
    std::size_t width = concat("rank ", rank).size();
    for (int step = rows.first; step < rows.end; ++step) width = std::max(width, cell(rank, step).size());
    widths.push_back(width);
  }
  const std::size_t step_width = std::max<std::size_t>(4, std::to_string(rows.end).size());

  const auto line = [&](const std::string& head, const auto& cell_of_rank, const std::string& tail) {
    std::string text = padded(head, step_width);
    for (int rank = columns.first; rank < columns.end; ++rank) {
      text += "  " + padded(cell_of_rank(rank), widths[static_cast<std::size_t>(rank - columns.first)]);
    }
    if (!tail.empty()) text += "  " + tail;
    return text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
  };
  std::string out = line("step", [](int rank) { return concat("rank ", rank); }, "");
  if (rows.first > 0) out += "…\n";
  for (int step = rows.first; step < rows.end; ++step) {
    const bool marked = options.mark_rank >= 0 && step == options.mark_position;
    out += line(std::to_string(step), [&](int rank) { return cell(rank, step); }, marked ? options.mark : "");
  }
  if (rows.end < steps) out += "…\n";
  if (columns.end - columns.first < schedule.ranks()) {
    out += concat("(ranks ", columns.first, " to ", columns.end - 1, " of ", schedule.ranks(), ")\n");
  }
  return out;
}

}  // namespace penstock
