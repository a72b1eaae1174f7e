// Results of a step: shares them between process ranks, and merges them for the caller.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "penstock/runtime/step.h"
#include "penstock/runtime/step_state.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Broadcasts outputs, losses and loss terms between the process ranks of a replica: afterwards each rank has all of
// them. Throws TransportError.
void share_results(StepOutputs& outputs, Group& replica_group, Deadline deadline);

// Moves the results of all replicas of this process, in order, into one result. Throws ChunkError if outputs cannot be
// merged.
StepResult take_results(std::vector<ReplicaStep>& replicas, const std::optional<c10::IValue>& output_merge_spec);

}  // namespace penstock::internal
