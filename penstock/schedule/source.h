// Places of a schedule's actions in the file that it was read from. A Schedule carries them through every pass, so that
// an error that is found after lowering still names a line and a column that its author can look up.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/action.h"

namespace penstock {

class Schedule;

class ScheduleSource {
 public:
  explicit ScheduleSource(std::string file) : file_(std::move(file)) {}

  // Begins the row of the next rank, which stands in this line. Lines and columns count from 1.
  void add_row(std::size_t line) { rows_.push_back({.line = line, .cells = {}}); }
  // Adds an action of the last row.
  void add_action(const Action& action, std::size_t column) { rows_.back().cells.push_back({action, column}); }

  // "schedule.csv:3:17", the place of the `count`-th (from 0) action of a rank's row that equals `action` or, if the row
  // has none, of the pair that it is a part of. Returns nothing for an action that is not in the file.
  std::optional<std::string> place_of(int rank, const Action& action, std::size_t count = 0) const;
  // "schedule.csv:3", the line of a rank's row.
  std::string line_of(int rank) const;

 private:
  struct Cell {
    Action action;
    std::size_t column;
  };
  struct Row {
    std::size_t line;
    std::vector<Cell> cells;
  };

  std::string file_;
  std::vector<Row> rows_;
};

// "schedule.csv:3:17" for an action that was read from a file, and "position 5" for any other.
std::string place_text(const Schedule& schedule, int rank, std::size_t position);

}  // namespace penstock
