// The StageGraph that a schedule needs, derived from a model's wiring and shared parameters.
#pragma once

#include "penstock/schedule/graph.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/wiring.h"

namespace penstock::internal {

// Returns a graph with one edge for each link of the wiring, and one group for each shared parameter.
//
// A stage receives and returns its messages in the order of its links, and the executor stores them in the order of the
// graph's edges at the stage. Both are the same order: ascending by the other stage. Throws std::logic_error if they
// are not.
StageGraph graph_of(const Wiring& wiring, const SharedParameters& shared);

}  // namespace penstock::internal
