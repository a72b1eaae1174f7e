// What actions and messages cost, for the simulator: by stage and by link, in any unit of time.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/schedule/placement.h"

namespace penstock {

// One stage and one microbatch.
struct StageCosts {
  double forward = 1;
  double input = 1;
  double weight = 1;
  // What it sends along each of its edges, and gets back as a gradient.
  double bytes_sent = 1;
  // What it keeps from its forward to its weight gradient; 0: not known.
  double bytes_kept = 0;
  // Time of its rank for UNSHARD, RESHARD and REDUCE_GRAD.
  double unshard = 0;
  double reshard = 0;
  double reduce = 0;
};

struct LinkCosts {
  // From the beginning of a send to the end of its receive, without the time for its bytes.
  double latency = 0;
  // Bytes in a unit of time; 0: without limit.
  double bandwidth = 0;
  // Time in which a rank does nothing else: the sender for a send, and the receiver for posting a receive and for taking a
  // message that has arrived.
  double send = 0;
  double post = 0;
  double receive = 0;
};

struct Costs {
  // By stage; a stage beyond the list costs what `stage` says.
  std::vector<StageCosts> stages;
  StageCosts stage;
  // By (from rank, to rank); any other link costs what `link` says.
  std::map<std::pair<int, int>, LinkCosts> links;
  LinkCosts link;
  // By rank, the time at which it begins; a rank beyond the list begins at 0.
  std::vector<double> starts;

  const StageCosts& of_stage(int index) const {
    return static_cast<std::size_t>(index) < stages.size() ? stages[static_cast<std::size_t>(index)] : stage;
  }
  const LinkCosts& of_link(int from_rank, int to_rank) const;
  double start_of(int rank) const {
    return static_cast<std::size_t>(rank) < starts.size() ? starts[static_cast<std::size_t>(rank)] : 0;
  }
};

// The middle one of some measurements.
double median(std::vector<double> measured, double if_none = 0);

// Throws ScheduleError when costs name a stage or a rank that there is not.
void require_fit(const Costs& costs, int stages, int ranks);

// Costs by stage out of costs by rank, `stages` of which are those of a rank's whole share of the model: each of a rank's
// stages takes an equal part of its times and of what it keeps. So schedules with different numbers of stages a rank do
// the same work.
Costs shared_out(const Costs& by_rank, const Placement& placement);

// Reads a costs file, on top of `defaults`:
//
//   {"version": 1,
//    "stages": [{"forward": 1, "input": 1, "weight": 1, "bytes_sent": 4096, "bytes_kept": 65536,
//                "unshard": 0, "reshard": 0, "reduce": 0}, …],
//    "links": [{"from": 0, "to": 1, "latency": 0.1, "bandwidth": 1e9, "send": 0, "post": 0, "receive": 0}, …]}
//
// Throws ScheduleError, which names `source` and the path to what is wrong.
Costs parse_costs(std::string_view text, const std::string& source, const Costs& defaults = {});

}  // namespace penstock
