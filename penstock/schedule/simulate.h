// Simulates a schedule under a cost model: start and end of each action, makespan, bubble, stall attribution (the idle
// time of each rank by the rank that it waited for), and peak memory of saved activations.
//
// Computations take the times of the cost model; a full backward takes an input and a weight backward. The parts of a
// pair run in turn, and the output of each part can be sent when that part ends. Sends, receives and operations on
// parameters keep the rank busy for the times of the cost model, by default none. UNSHARD and REDUCE_GRAD do not wait
// for other replicas; SUM_SHARED blocks until all ranks of its group have joined.
//
// A link transfers one message at a time, in the order of sending: each takes bytes ÷ bandwidth and arrives a latency
// later. A message whose receive is posted after its turn does not delay later ones: it arrives bytes ÷ bandwidth and a
// latency after the receive was posted, whatever else is in flight then. In a schedule of computations only, results
// are sent at once and receives are always posted.
//
//   const Timeline timeline = simulate(lower(gpipe(/*ranks=*/4, /*microbatches=*/8)));
//   timeline.bubble;  // fraction of the ranks' time that is idle
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/memory.h"
#include "penstock/schedule/samples.h"
#include "penstock/schedule/schedule.h"

namespace penstock {

// Start and end of an action.
struct Span {
  double start = 0;
  double end = 0;
};

// The transfer of a message, which runs beside the computation of a rank.
struct Transfer {
  // Index of the rank's action, which is a send or a receive.
  std::size_t action = 0;
  Span span;
  // Rank at the other end; -1 if it is not known.
  int peer = -1;
  double bytes = 0;
};

struct RankTimes {
  // Span of each action of the rank.
  std::vector<Span> spans;
  // Time spent computing.
  double work = 0;
  // Idle time before the first computation, after the last one, and in between by the rank that it waited for.
  double fill = 0;
  double drain = 0;
  std::map<int, double> waiting;
  // Time from the start of the first computation to the end of the last computation or collective.
  double span = 0;
  // Bytes that are in memory all the time, and the peak of all memory; and the largest number of microbatches whose
  // activations are saved at a time: see memory.h and liveness.h.
  double static_bytes = 0;
  double peak_bytes = 0;
  int peak_activations = 0;
  // Measured memory over time; empty for a simulation.
  std::vector<MemoryStep> memory;
  // Measured transfers, in the order of their actions; empty for a simulation, and where they were not measured.
  std::vector<Transfer> transfers;
};

struct Timeline {
  double makespan = 0;
  // Idle fraction of the ranks' time: 1 − work ÷ (ranks × makespan).
  double bubble = 0;
  // Longest span of a rank: the time of a step if ranks do not wait for each other at its ends, so that the skew
  // between them costs nothing.
  double longest_span = 0;
  std::vector<RankTimes> ranks;
};

// Spans of the parts of a pair.
struct PairSpans {
  Span first;
  Span second;
};
// Returns the spans of the parts of a pair that ran in `span`: the first part runs from its start, the second to its
// end.
PairSpans split_pair(const Action& pair, const Span& span, const Costs& costs);

// Returns the time of a computation, or of an operation on parameters, of a stage.
double duration(Computation computation, const StageCosts& stage);

// Sets the memory of each rank in a timeline by the cost model, except for ranks whose memory was measured.
void add_memory(const Schedule& schedule, const Costs& costs, Timeline& timeline);

// Simulates a schedule. Throws ScheduleError if `verify_each_list` refuses it, if it deadlocks (`verify` explains
// where), or if the makespan is not a finite number.
Timeline simulate(const Schedule& schedule, const Costs& costs = {});

// Simulates a step in which times vary. Each action takes the time of a random sample of its kind; no sample is drawn
// again before all others of its kind have been drawn. Without samples of a kind, the action takes the time of the cost
// model. The same seed gives the same timeline.
Timeline simulate(const Schedule& schedule, const Costs& costs, const CostSamples& samples, std::uint64_t seed);

}  // namespace penstock
