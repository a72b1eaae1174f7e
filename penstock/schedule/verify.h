// Proves from the lists alone that a schedule runs to its end and computes what it should: every computation once, its
// inputs before it, sends and receives paired, shards present when used, gradients reduced once, and no deadlock even
// when every send blocks until its receive is posted.
#pragma once

#include <optional>
#include <string>

#include "penstock/schedule/schedule.h"

namespace penstock {

struct Violation {
  int rank = 0;
  // Index into the rank's list; its length when something is missing at the end.
  int position = 0;
  // One sentence, and for a deadlock the cycle, a line for each rank in it.
  std::string what;
};

// The first violation, or none. `expected` says what the schedule should contain; left out, what it does contain, and
// sums of shared parameters where it has reductions and the graph has groups.
std::optional<Violation> verify(const Schedule& schedule);
std::optional<Violation> verify(const Schedule& schedule, const Features& expected);

// The same without the run of all lists against each other: what it accepts is complete and paired, and may deadlock.
std::optional<Violation> verify_each_list(const Schedule& schedule, const Features& expected);

// Returns the violation in full: rank, position (or line and column of the file that the schedule was read from) and
// action, the sentence, and the table around the place, which is marked.
std::string explain(const Schedule& schedule, const Violation& violation);

// Throws ScheduleError with the explanation of the first violation; `require_lists` of what verify_each_list finds.
void require_valid(const Schedule& schedule);
void require_lists(const Schedule& schedule);

}  // namespace penstock
