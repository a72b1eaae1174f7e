// Verifies from the schedule alone that it runs to completion and computes the right thing: every computation occurs
// once and after its inputs, sends and receives are matched, parameters are gathered when used, gradients are reduced
// once, and no deadlock is possible, even if every send blocks until its receive is posted.
//
//   if (const auto violation = verify(schedule)) std::cerr << explain(schedule, *violation);
#pragma once

#include <optional>
#include <string>

#include "penstock/schedule/schedule.h"

namespace penstock {

struct Violation {
  int rank = 0;
  // Index into the rank's actions; their number if something is missing at the end.
  int position = 0;
  // One sentence. For a deadlock, the cycle follows, with a line for each rank in it.
  std::string what;
};

// Returns the first violation, or none. `expected` says what the schedule should contain. By default, that is what it
// does contain, and sums of shared parameters if it has reductions and stages that share parameters.
std::optional<Violation> verify(const Schedule& schedule);
std::optional<Violation> verify(const Schedule& schedule, const Features& expected);

// Performs the checks of `verify` except the search for deadlocks: an accepted schedule is complete and matched, but
// may deadlock.
std::optional<Violation> verify_each_list(const Schedule& schedule, const Features& expected);

// Returns the violation in full: rank, position (or line and column of the file that the schedule was read from) and
// action, the sentence, and an excerpt of the schedule in which the place is marked.
std::string explain(const Schedule& schedule, const Violation& violation);

// Throws ScheduleError with the explanation of the first violation that `verify` finds.
void require_valid(const Schedule& schedule);
// Throws ScheduleError with the explanation of the first violation that `verify_each_list` finds.
void require_lists(const Schedule& schedule);

}  // namespace penstock
