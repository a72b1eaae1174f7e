// Predicts the peak memory of a rank from its schedule and the memory that its stages need.
#pragma once

#include <span>

#include "penstock/schedule/schedule.h"

namespace penstock::internal {

// Memory of one stage, in bytes.
struct StageMemory {
  // Parameters and optimizer state, which are allocated all the time.
  double parameters = 0;
  double optimizer = 0;
  // Gradients of the parameters: allocated from the first backward on, or with shards from REDUCE_GRAD on.
  double gradients = 0;
  // Full parameters gathered from shards. Their gradients take the same again from the first backward to REDUCE_GRAD.
  double unsharded = 0;
  // Saved tensors of one microbatch: from its forward, or recomputation, to its input gradient; from there to its weight
  // gradient, if the backward is split; and from a forward that will be recomputed until then.
  double saved_activations = 0;
  double weight_inputs = 0;
  double recomputation_inputs = 0;
  // Temporary memory of a forward and of a backward, beyond what is allocated before and after it.
  double forward_workspace = 0;
  double backward_workspace = 0;
  // Temporary memory of the optimizer step.
  double update_workspace = 0;
  // Size of the message with the stage's output, which is also that of its gradient.
  double message = 0;
};

// Returns the peak memory of a rank in bytes, while it runs its actions of a lowered schedule or steps its optimizers.
//
// Between processes, messages are copied:
//   - A received activation is alive from its RECV_F to its weight gradient, and a received gradient from its RECV_B to
//     its backward. The memory is reused for later messages, so its peak counts all the time.
//   - Sent messages are alive until the end of the step, up to the limits of the send queue.
double predicted_bytes(const Schedule& schedule, int rank, std::span<const StageMemory> stages, bool between_processes);

}  // namespace penstock::internal
