// Weights of microbatches: how much each of their losses counts in the loss and in the gradients of the whole batch.
#pragma once

#include "penstock/runtime/executor.h"
#include "penstock/transport/transport.h"

namespace penstock::internal {

// Evaluates the weight of each microbatch's target into work.loss_weights. Throws PipelineError for a weight that is not a
// finite number of at least 0.
void weigh(StepWork& work, const LossWeight& weight);

// Sets work.weights, the factor of each microbatch's loss in the gradients, from its loss_weights: their share of `total`,
// which is the weight of all replicas. Reductions average over replicas, so the factors of all of them add up to `replicas`.
void set_seeds(StepWork& work, double total, int replicas);

// Shares the weights between process ranks, and sets the factors. The rank that has the last stage of a replica knows its
// weights; the groups are those of its replica and of its counterparts in other replicas, null where a rank is alone.
// Throws TransportError.
void share_weights(StepWork& work, Group* replica_group, Group* counterparts, int replicas, Deadline deadline);

// Number of loss terms that stages of this process have added.
std::int64_t count_terms(const StepWork& work);
// Sets work.has_terms_elsewhere on all ranks of a replica. Throws TransportError.
void share_terms(StepWork& work, Group& replica_group, Deadline deadline);

}  // namespace penstock::internal
