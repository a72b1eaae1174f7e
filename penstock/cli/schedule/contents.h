// Counts the actions of a schedule, and formats tables.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock::internal::cli {

// Returns the schedule as it is executed: unchanged if it has communication, else lowered. Throws ScheduleError if it
// is not valid.
Schedule lowered(const Schedule& schedule);

// Counts F, I, W, B and R. An overlapped pair counts as two.
std::size_t count_computations(const Schedule& schedule);
std::size_t count_messages(const Schedule& schedule);
// Returns "4 ranks, 4 stages, 8 microbatches, 64 computations, 48 messages".
std::string contents_text(const Schedule& schedule);

// Returns what torch.distributed.pipelining does wrong with the schedule as a CSV file, as ends of sentences: "refuses
// this file: it does not know recomputations (0R0)". Empty if it can read the file.
std::vector<std::string> problems_in_torch(const Schedule& schedule);

// Writes a table with aligned columns, the first to the left and the others to the right.
void write_columns(std::ostream& out, const std::vector<std::vector<std::string>>& rows);
// Returns a number with this many digits after the decimal point.
std::string rounded(double value, int digits);

}  // namespace penstock::internal::cli
