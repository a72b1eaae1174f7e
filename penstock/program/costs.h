// What the nodes of a graph cost.
#pragma once

#include <cstdint>
#include <vector>

#include "penstock/program/program.h"

namespace penstock {

struct NodeCost {
  // Of the forward, for a microbatch of the example's sizes.
  double flops = 0;
  // What it reads and writes.
  double bytes = 0;
  // Forward and backward, on one thread.
  double seconds = 0;
};

// From the shapes of the export alone, by what operators are known to do; seconds are those of a core of our time.
std::vector<NodeCost> estimated_costs(const Program& program);
// With seconds as they were when the program ran on these arguments, the median of some runs. The weights and the random
// numbers of the process stay as they are.
std::vector<NodeCost> measured_costs(const Program& program, const Args& args, const Kwargs& kwargs = {});

}  // namespace penstock
