// Runs a schedule on paper: when each action starts and ends, how long the whole takes, who waits for whom, and how much
// each rank keeps.
//
// Computations take the time that costs say: a full backward an input and a weight backward, a pair the times of its
// parts in turn, each part's result leaving at the part's own end. Sends, receives and changes of parameters take the rank
// the time that costs say, by default none; collectives are not waited for. A link
// takes messages one at a time in the order of sending, each for bytes ÷ bandwidth, and delivers it a latency later. A
// message whose receive is posted after its turn does not hold up the others: it arrives bytes ÷ bandwidth and a latency
// after the posting, whatever else is under way then. In a schedule of computations only, sends follow at once and
// receives are always posted.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/samples.h"
#include "penstock/schedule/schedule.h"

namespace penstock {

struct Span {
  double start = 0;
  double end = 0;
};

struct RankTimes {
  // One for each action of the rank.
  std::vector<Span> spans;
  // Time spent computing.
  double work = 0;
  // Idle time: before the first computation, after the last, and in between by the rank that was waited for.
  double fill = 0;
  double drain = 0;
  std::map<int, double> waiting;
  // At most at one time, from a forward's start to the end of its W or B; of its own in a schedule of forwards alone.
  int peak_activations = 0;
  double peak_bytes = 0;
};

struct Timeline {
  double makespan = 0;
  // 1 − work ÷ (ranks × makespan).
  double bubble = 0;
  std::vector<RankTimes> ranks;
};

// When the parts of the pair that took `span` ran: the first at once, the second until the end.
struct PairSpans {
  Span first;
  Span second;
};
PairSpans split_pair(const Action& pair, const Span& span, const Costs& costs);

// Returns what one computation, or one change of parameters, takes on its stage.
double duration(Computation computation, const StageCosts& stage);

// Throws ScheduleError when a list is not as it should be, or the lists do not run to their end; `verify` says why.
Timeline simulate(const Schedule& schedule, const Costs& costs = {});

// Simulates a step in which times vary. Each action takes one of the samples of its kind, chosen at random, and no sample is
// chosen again before all others of its kind; where there are none, the action takes what costs say. The same seed gives
// the same timeline.
Timeline simulate(const Schedule& schedule, const Costs& costs, const CostSamples& samples, std::uint64_t seed);

}  // namespace penstock
