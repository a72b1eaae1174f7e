// The cost model of the simulator: times of computations and sizes of what they keep in memory by stage, times of
// messages by link, and the memory of ranks. Times are in any unit, as long as all of them are in the same one.
//
//   Costs costs;
//   costs.stages = {{.forward = 2.0}, {.forward = 5.0}};
//   costs.links[{0, 1}] = {.latency = 0.5};
//   double makespan = simulate(schedule, costs).makespan;
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock/schedule/placement.h"

namespace penstock {

// Costs of one stage for one microbatch.
struct StageCosts {
  // Times of the forward, the input backward and the weight backward. A full backward takes the sum of the latter two.
  double forward = 1;
  double input = 1;
  double weight = 1;
  // Size of the activation that the stage sends along each of its edges, and of the gradient that it gets back.
  double bytes_sent = 1;
  // Time of a recomputation; none for that of the forward.
  std::optional<double> recompute = std::nullopt;
  // Sizes of what the stage saves of a microbatch, 0 if unknown: from the forward to the input gradient; from the input
  // gradient to the weight gradient, none for as much as before; and the inputs of a forward that will be recomputed.
  double activation_bytes = 0;
  std::optional<double> weight_bytes = std::nullopt;
  double input_bytes = 0;
  // Sizes of what is in memory all the time, and of the gradients, which are from the first weight gradient on.
  double parameter_bytes = 0;
  double optimizer_bytes = 0;
  double gradient_bytes = 0;
  // Size of the gradients from before the step to which it adds. They stay in memory until the step has succeeded.
  double accumulated_bytes = 0;
  // Size of the full parameters that UNSHARD gathers. Full gradients take as much until REDUCE_GRAD; the sizes above
  // are then those of shards.
  double unsharded_bytes = 0;
  // Temporary memory of a forward or recomputation, of a backward, and of the optimizer step.
  double forward_workspace = 0;
  double backward_workspace = 0;
  double update_workspace = 0;
  // Memory that a message with the stage's output, or with its gradient, takes in its sender and in its receiver; 0 if
  // messages are not copied, as between threads.
  double message_bytes = 0;
  // Times that UNSHARD, RESHARD and REDUCE_GRAD keep the rank busy. They do not depend on the microbatch.
  double unshard = 0;
  double reshard = 0;
  double reduce = 0;
};

// Costs of a message from one rank to another.
struct LinkCosts {
  // Time from the start of a send to the end of its receive, without the transfer time of its bytes.
  double latency = 0;
  // Bytes per unit of time; 0 means unlimited.
  double bandwidth = 0;
  // Times that a rank is busy: the sender with a send, the receiver with posting a receive, and the receiver with a
  // message that has arrived.
  double send = 0;
  double post = 0;
  double receive = 0;
};

// Memory of one rank, in bytes.
struct RankCosts {
  // Memory that the rank has; 0 for unlimited.
  double capacity = 0;
  // Memory that is used all the time besides that of the stages.
  double buffer_bytes = 0;
  // Most memory that sent messages take until the end of the step; 0 for unlimited.
  double sent_bytes = 0;
};

// Returns true if a rank has that much memory.
inline bool fits(const RankCosts& rank, double bytes) {
  return rank.capacity == 0 || bytes <= rank.capacity;
}

struct Costs {
  // Costs by stage. `stage` applies to stages beyond the end of the list.
  std::vector<StageCosts> stages;
  StageCosts stage;
  // Costs by (sending rank, receiving rank). `link` applies to all other links.
  std::map<std::pair<int, int>, LinkCosts> links;
  LinkCosts link;
  // Time at which each rank starts. Ranks beyond the end of the list start at 0.
  std::vector<double> starts;
  // Memory by rank. `rank` applies to ranks beyond the end of the list.
  std::vector<RankCosts> ranks;
  RankCosts rank;

  const StageCosts& of_stage(int index) const {
    return static_cast<std::size_t>(index) < stages.size() ? stages[static_cast<std::size_t>(index)] : stage;
  }
  const LinkCosts& of_link(int from_rank, int to_rank) const;
  const RankCosts& of_rank(int index) const {
    return static_cast<std::size_t>(index) < ranks.size() ? ranks[static_cast<std::size_t>(index)] : rank;
  }
  double start_of(int index) const {
    return static_cast<std::size_t>(index) < starts.size() ? starts[static_cast<std::size_t>(index)] : 0;
  }
};

// Returns the median of some measurements (the upper one of two), or `if_none` if there are none.
double median(std::vector<double> measured, double if_none = 0);

// Throws ScheduleError if the costs name a stage or a rank that does not exist.
void require_fit(const Costs& costs, int stages, int ranks);

// Turns costs by rank into costs by stage. In `by_rank`, `stages[r]` are the costs of all stages of rank r together;
// each stage of the rank gets an equal part of them, but all of `bytes_sent`, `message_bytes` and `input_bytes`, the
// sizes of a boundary. So schedules with different numbers of stages per rank do the same work.
Costs split_rank_costs(const Costs& by_rank, const Placement& placement);

// Parses a costs file. Costs that it does not name are those of `defaults`.
//
//   {"version": 2,
//    "stages": [{"forward": 1, "input": 1, "weight": 1, "recompute": 1, "bytes_sent": 4096, "activation_bytes": 65536,
//                "weight_bytes": 32768, "input_bytes": 4096, "parameter_bytes": 1e6, "gradient_bytes": 1e6,
//                "accumulated_bytes": 0, "optimizer_bytes": 2e6, "unsharded_bytes": 0, "forward_workspace": 0, "backward_workspace": 0,
//                "update_workspace": 0, "message_bytes": 0, "unshard": 0, "reshard": 0, "reduce": 0}, …],
//    "links": [{"from": 0, "to": 1, "latency": 0.1, "bandwidth": 1e9, "send": 0, "post": 0, "receive": 0}, …],
//    "ranks": [{"capacity": 2e9, "buffer_bytes": 1e6, "sent_bytes": 0}, …]}
//
// Version 1 has no sizes but bytes_sent and activation_bytes, no times of recomputations, and no ranks.
// Throws ScheduleError, which names `source` and the path of the wrong entry.
Costs parse_costs(std::string_view text, const std::string& source, const Costs& defaults = {});

// Returns the costs as such a file, with all stages, links and ranks that `costs` lists.
std::string to_json(const Costs& costs);

}  // namespace penstock
