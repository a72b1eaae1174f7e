// Costs of a graph's nodes: estimated from shapes, or measured.
#pragma once

#include <vector>

#include "penstock/program/program.h"

namespace penstock {

// Cost of one node for a microbatch of the export's example sizes.
struct NodeCost {
  // Floating-point operations of the forward.
  double flops = 0;
  // Bytes that the forward reads and writes.
  double bytes = 0;
  // Time of forward and backward on one thread.
  double seconds = 0;
};

// Estimates the cost of each node from the shapes of the export, without running it. The seconds assume a current CPU
// core.
std::vector<NodeCost> estimated_costs(const Program& program);
// Like estimated_costs, with seconds measured on these arguments: the median of five forwards, and twice that for the
// backward. Leaves the weights and the random state of the process unchanged. Throws ProgramError.
std::vector<NodeCost> measured_costs(const Program& program, const Args& args, const Kwargs& kwargs = {});

}  // namespace penstock
