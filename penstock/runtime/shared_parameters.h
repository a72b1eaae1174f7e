// Parameters that several stages have.
#pragma once

#include <string>
#include <vector>

#include "penstock/schedule/graph.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/wiring.h"

namespace penstock {

// A parameter of a stage, by its name there.
struct SharedParameter {
  int stage = 0;
  std::string name;
  friend bool operator==(const SharedParameter&, const SharedParameter&) = default;
};
// For each parameter, all the stages that have it.
using SharedParameters = std::vector<std::vector<SharedParameter>>;

// Those that were named, and those that are one tensor in several of these stages; what has a place in common is one.
SharedParameters find_shared(const std::vector<PipelineStage>& stages, const SharedParameters& named);

// The links of a wiring, with the stages that share parameters.
StageGraph graph_of(const Wiring& wiring, const SharedParameters& shared);

}  // namespace penstock
