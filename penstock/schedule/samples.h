// Measurements of the actions of one step, for a simulation in which times vary as they did in that step.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "penstock/schedule/action.h"

namespace penstock {

struct CostSamples {
  struct Link {
    // As the fields of LinkCosts.
    std::vector<double> latency;
    std::vector<double> send;
    std::vector<double> post;
    std::vector<double> receive;
  };

  // By stage: durations of each kind of computation and of each change of parameters.
  std::vector<std::map<Computation, std::vector<double>>> stages;
  // By (from rank, to rank).
  std::map<std::pair<int, int>, Link> links;
};

}  // namespace penstock
