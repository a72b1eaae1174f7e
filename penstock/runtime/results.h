// What comes out of a step.
#pragma once

#include <ATen/core/ivalue.h>

#include <optional>
#include <vector>

#include "penstock/runtime/executor.h"
#include "penstock/runtime/step.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// The ranks of a replica tell one another what they have: afterwards each has the outputs, losses and terms of all.
// Throws TransportError.
void share_results(StepWork& work, Group& ranks, Deadline deadline);

// Of one replica after the other.
StepResult take_results(std::vector<StepWork>& works, const std::optional<c10::IValue>& output_merge_spec);

}  // namespace penstock::internal
