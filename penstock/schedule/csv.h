// Schedules as CSV, in the form of torch.distributed.pipelining: a row for each rank, a cell for each action, an empty
// cell for an idle slot.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock {

std::string to_csv(const Schedule& schedule);

struct CsvOptions {
  // Named in errors.
  std::string source = "schedule.csv";
  // Edges besides the chain and those that messages in the file name; groups of stages that share parameters.
  std::vector<Edge> skips = {};
  std::vector<std::vector<int>> shared = {};
};

// The schedule that a CSV says; stages lie where their actions stand, and idle slots are left out. The file is read for
// what it is, and not verified; empty lines stand for ranks without actions, but not at the end. Throws ScheduleError,
// with the file, and the line and column where there is one.
Schedule parse_csv(std::string_view text, const CsvOptions& options = {});

}  // namespace penstock
