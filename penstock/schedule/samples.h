// Measured durations of the actions of one step, for a simulation whose times vary as they did in that step.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "penstock/schedule/action.h"

namespace penstock {

struct CostSamples {
  // Samples of the fields of LinkCosts.
  struct Link {
    std::vector<double> latency;
    std::vector<double> send;
    std::vector<double> post;
    std::vector<double> receive;
  };

  // Durations by stage and kind of computation, or operation on parameters.
  std::vector<std::map<Computation, std::vector<double>>> stages;
  // Samples by (sending rank, receiving rank).
  std::map<std::pair<int, int>, Link> links;
};

}  // namespace penstock
