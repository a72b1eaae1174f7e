// Weights of microbatches: how much the loss of each counts in the loss and the gradients of the whole batch.
#pragma once

#include <cstdint>

#include "penstock/runtime/step.h"
#include "penstock/runtime/step_state.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Evaluates the weight of each microbatch's target into inputs.weights. Throws PipelineError for a weight that is not a
// finite number of at least 0.
void weigh(StepInputs& inputs, const LossWeight& weight);

// Sets the factor of each microbatch's loss in the gradients: its weight as a share of `total`, the weight of all
// replicas. Reductions average over replicas, so the factors of all of them add up to the number of replicas.
void set_factors(LossWeights& weights, double total, int replicas);

// Shares the weights between process ranks, and sets the factors. The rank of the last stage of a replica knows the
// replica's weights. `replica_group` are the ranks of this rank's replica, `counterparts` the ranks with the same
// stages in other replicas; each is null if this rank is its only member. Throws TransportError.
void share_weights(LossWeights& weights, Group* replica_group, Group* counterparts, int replicas, Deadline deadline);

// Returns the number of loss terms that stages of this process have added.
std::int64_t count_terms(const StepOutputs& outputs);
// Sets has_terms_elsewhere on all ranks of a replica. Throws TransportError.
void share_terms(StepOutputs& outputs, Group& replica_group, Deadline deadline);

}  // namespace penstock::internal
