// Records of what ran: when each action of each rank began and ended, how long it waited, and what it sent or received.
// Every step is recorded; a record is drawn like a simulated timeline.
//
//   pipeline.step({x}, {}, y);
//   const Timeline timeline = timeline_of(pipeline.recorded_schedule(), pipeline.record());
//   const Costs costs = costs_of(pipeline.recorded_schedule(), pipeline.record());
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
  // Part of that time that was spent waiting for other ranks.
  std::int64_t waited = 0;
  // Bytes of the message, or of the messages that a computation received; 0 for a receive whose transfer was not
  // measured.
  std::int64_t bytes = 0;
  // Other rank of a message, or the rank that a computation waited for last; -1 for none.
  int peer = -1;
  // Bytes of the rank's tensors after the action, and at most while it ran; 0 if they were not measured.
  std::int64_t allocated = 0;
  std::int64_t peak_allocated = 0;
  // Time at which this rank's devices began to transfer the message of a send or a receive, and at which they had
  // transferred it, beside what they computed; both are 0 if it was not measured, as on the CPU. The transfer is a copy
  // that the rank has made, or the operation of a device backend, which waits for its other end.
  std::int64_t transfer_start = 0;
  std::int64_t transfer_end = 0;

  bool has_transfer() const { return transfer_end != 0; }
};

// One record for each action, by rank.
using Record = std::vector<std::vector<ActionRecord>>;

// Returns the record with the times of all ranks on one clock. Process ranks begin a step at different times, and on
// several machines their clocks differ. The difference between two ranks is estimated from their fastest messages to
// each other, which are assumed to take equally long in both directions. Time 0 is when the first rank began. A rank
// that does not both send to and receive from another one, directly or through other ranks, keeps its own time.
Record with_common_clock(const Schedule& schedule, Record record);

// Returns the record as a timeline in milliseconds. Computations are drawn without the time that they waited. A receive
// is drawn from when its transfer had also begun on the sender, if that was measured too: before, it waited.
Timeline timeline_of(const Schedule& schedule, const Record& record);

// Returns the costs, in milliseconds, with which the simulator repeats what ran: the time of each stage's actions, when
// each rank began, latency and bandwidth of each link, and the time that ranks spend on its messages. Each is the mean
// over a record, and the median over several records of one schedule. A message's latency shows where its receiver
// waited for it. The bandwidth shows where messages of different sizes were sent through one link, and is otherwise
// part of the latency.
Costs costs_of(const Schedule& schedule, const Record& record);
Costs costs_of(const Schedule& schedule, std::span<const Record> records);

// Simulates the steps of some records of one schedule, and returns the simulation with the median bubble. Each is
// simulated with the times that it had (CostSamples), in another order: means alone would hide the time that a rank
// loses because another one is slow now and then, which is most of the bubble where messages occasionally take long.
// `records` must not be empty.
Timeline simulate_records(const Schedule& schedule, std::span<const Record> records);

}  // namespace penstock
