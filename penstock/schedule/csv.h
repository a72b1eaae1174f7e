// Schedules as CSV, in the form of torch.distributed.pipelining: a row for each rank, a cell for each action, an empty
// cell for an idle slot. Ours may also have comments, from a `#` to the end of its line, and blank lines; PyTorch's reader
// takes neither, so to_csv writes none.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock {

// Writes a row for each rank; a rank without actions is a row of two idle slots, since a blank line is no rank.
std::string to_csv(const Schedule& schedule);

struct CsvOptions {
  // Named in errors.
  std::string source = "schedule.csv";
  // Edges besides the chain and those that messages in the file name; groups of stages that share parameters.
  std::vector<Edge> skips = {};
  std::vector<std::vector<int>> shared = {};
};

// Reads a schedule; stages lie where their actions stand, and idle slots are left out. Lines that are blank or have a
// comment alone are skipped; every other line is a rank, also one of commas alone. The file is not verified. Errors that
// are found in the schedule later name their place in the file. Throws ScheduleError, with the file, and the line and
// column where there is one.
Schedule parse_csv(std::string_view text, const CsvOptions& options = {});

}  // namespace penstock
