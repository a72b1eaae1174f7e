// Locations of a schedule's actions in the file that it was read from. A Schedule carries them through every pass, so
// that an error found after lowering still names a line and a column of the user's file.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/action.h"

namespace penstock {

class Schedule;

class ScheduleSource {
 public:
  explicit ScheduleSource(std::string file) : file_(std::move(file)) {}

  // Begins the row of the next rank, which is in this line. Lines and columns count from 1.
  void add_row(std::size_t line) { rows_.push_back({.line = line, .cells = {}}); }
  // Adds an action to the last row.
  void add_action(const Action& action, std::size_t column) { rows_.back().cells.push_back({action, column}); }

  // Returns the location ("schedule.csv:3:17") of the `count`-th action, from 0, of a rank's row that equals `action`.
  // If the row has none, returns that of the pair that has it as a part. Returns nothing for an action that is not in
  // the file.
  std::optional<std::string> place_of(int rank, const Action& action, std::size_t count = 0) const;
  // Returns the location of a rank's row: "schedule.csv:3".
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

// Returns "schedule.csv:3:17" for an action that was read from a file, and "position 5" for any other.
std::string place_text(const Schedule& schedule, int rank, std::size_t position);

}  // namespace penstock
