// Reads and writes schedules in the CSV format of torch.distributed.pipelining: a row for each rank, a cell for each
// action, an empty cell for an idle slot. parse_csv also accepts comments, from a `#` to the end of the line, and blank
// lines. PyTorch's reader accepts neither, so to_csv writes none.
//
//   Schedule schedule = parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
//   std::string text = to_csv(lower(schedule));
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock {

// Returns the schedule as CSV. A rank without actions becomes a row of two idle slots, as a blank line is not a rank.
std::string to_csv(const Schedule& schedule);

struct CsvOptions {
  // Name of the file in error messages.
  std::string source = "schedule.csv";
  // Skip connections, besides those that messages in the file name with `@`.
  std::vector<Edge> skips = {};
  // Groups of stages that share parameters.
  std::vector<std::vector<int>> shared = {};
};

// Parses a schedule. A stage is placed on the rank whose row has its actions; idle slots are dropped. Blank lines and
// lines with only a comment are skipped; every other line is a rank, even if it consists of commas only. The schedule
// is not verified, but it remembers the file, so that errors found later name a line and a column of it. Throws
// ScheduleError, with the file, and the line and column if there is one.
Schedule parse_csv(std::string_view text, const CsvOptions& options = {});

}  // namespace penstock
