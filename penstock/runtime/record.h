// A record of what ran: when each action of each rank began and ended, how long it waited, and what it moved. It is made
// in every step; a timeline of it is drawn as simulated ones are.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/schedule.h"
#include "penstock/schedule/simulate.h"

namespace penstock {

struct ActionRecord {
  // Nanoseconds since the step began.
  std::int64_t start = 0;
  std::int64_t end = 0;
  // Of that, waiting for another rank.
  std::int64_t waited = 0;
  // What a message carried, or a computation received.
  std::int64_t bytes = 0;
  // The rank at the other end of a message, or the one that a computation waited for last; -1 for none.
  int peer = -1;
};

// By rank, one for each of its actions.
using Record = std::vector<std::vector<ActionRecord>>;

// The same as a timeline, in milliseconds: computations without the time that they waited.
Timeline timeline_of(const Schedule& schedule, const Record& record);

// What each stage's computations took, by their medians, in milliseconds, for the simulator.
Costs costs_of(const Schedule& schedule, const Record& record);

}  // namespace penstock
