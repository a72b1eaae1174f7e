// A record of what ran: when each action of each rank began and ended, how long it waited, and what it moved. It is made
// in every step; a timeline of it is drawn as simulated ones are.
#pragma once

#include <cstdint>
#include <span>
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

// Puts the ranks of a record on one clock. Process ranks begin a step at different times, and on several machines their
// clocks differ: the difference between two ranks is taken from their fastest messages to each other, which are assumed to
// take as long in both directions. Time 0 is when the first of them began. A rank that does not both send to another and
// receive from it, directly or through other ranks, keeps its own time.
Record with_common_clock(const Schedule& schedule, Record record);

// The same as a timeline, in milliseconds: computations without the time that they waited.
Timeline timeline_of(const Schedule& schedule, const Record& record);

// Returns what the simulator needs to repeat what ran, in milliseconds: what each stage's actions took, when each rank
// began, and for each link its latency and bandwidth, and the time of its ranks. Each is the mean of a record and, of several
// records of one schedule, the median of these. A message's latency shows where its receiver waited for it; the
// bandwidth where messages of different sizes went over one link, and is otherwise part of the latency.
Costs costs_of(const Schedule& schedule, const Record& record);
Costs costs_of(const Schedule& schedule, std::span<const Record> records);

// Simulates the steps that some records of one schedule are of, and returns the simulation with the median bubble. A step
// is simulated with the times that it had (CostSamples), in another order: means alone would leave out what a rank loses
// because another one is late now and then, which is most of the bubble where messages take long at times. `records` is not
// empty.
Timeline simulate_records(const Schedule& schedule, std::span<const Record> records);

}  // namespace penstock
