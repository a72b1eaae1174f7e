// Computes the statistics of a Pipe.
#pragma once

#include <vector>

#include "penstock/program/partition/partition.h"
#include "penstock/program/pipe.h"

namespace penstock::internal {

// `modules` and `partitions` are indexed by stage, `stage_of_node` by node.
PipeInfo make_pipe_info(const Program& program, const std::vector<int>& stage_of_node,
                        const std::vector<StagePartition>& partitions, const std::vector<StageModule>& modules,
                        const Wiring& wiring);

}  // namespace penstock::internal
