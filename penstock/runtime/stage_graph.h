// The StageGraph that a schedule needs, derived from a model's wiring and shared parameters.
#pragma once

#include "penstock/schedule/graph.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/wiring.h"

namespace penstock::internal {

// Returns a graph with one edge for each link of the wiring, and one group for each shared parameter.
StageGraph graph_of(const Wiring& wiring, const SharedParameters& shared);

}  // namespace penstock::internal
