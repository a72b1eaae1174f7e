// Checks that the models of a pipeline's replicas fit the schedule and each other.
#pragma once

#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/stage/staged_model.h"

namespace penstock::internal {

// Throws PipelineError if there is no model, if stages are missing or out of order, or if replicas have different
// wirings or shared parameters. With thread ranks each model has all stages; with process ranks there is one model,
// with some.
void require_models(const std::vector<StagedModel>& replicas, const Schedule& schedule, bool are_threads);

}  // namespace penstock::internal
