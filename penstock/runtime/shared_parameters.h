// Which parameters several stages have.
#pragma once

#include <vector>

#include "penstock/schedule/graph.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"

namespace penstock::internal {

// Those that were named, and those that are one tensor in several of these stages; what has a place in common is one.
SharedParameters find_shared(const std::vector<PipelineStage>& stages, const SharedParameters& named);

// The links of a wiring, with the stages that share parameters.
StageGraph graph_of(const Wiring& wiring, const SharedParameters& shared);

}  // namespace penstock::internal
