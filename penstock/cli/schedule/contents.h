// What a schedule contains, and tables of text.
#pragma once

#include <cstddef>
#include <iosfwd>
#include <string>
#include <vector>

#include "penstock/schedule/schedule.h"

namespace penstock::cli {

// Returns what is executed: the lists as they are if they have messages, else lowered. Throws ScheduleError when they are
// not valid.
Schedule lowered(const Schedule& schedule);

// Counts F, I, W and B; a pair has two.
std::size_t count_computations(const Schedule& schedule);
std::size_t count_messages(const Schedule& schedule);
// "4 ranks, 4 stages, 8 microbatches, 64 computations, 48 messages"
std::string contents_text(const Schedule& schedule);

// Aligns columns of text; the first to the left, the others to the right.
void write_columns(std::ostream& out, const std::vector<std::vector<std::string>>& rows);
// A number with so many digits behind the point.
std::string rounded(double value, int digits);

}  // namespace penstock::cli
