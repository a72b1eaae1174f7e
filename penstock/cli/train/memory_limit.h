// --memory: refuses a run whose ranks would need more memory than there is.
#pragma once

#include "penstock/cli/train/options.h"
#include "penstock/cli/train/setup.h"
#include "penstock/train/agreement.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {

// Throws std::runtime_error if a rank needs more than --memory: by the sizes of its weights, gradients and optimizer
// state, or by two trial steps with the first microbatch of each batch, from which the memory of the whole schedule is
// predicted. The message names options under which the run would fit, each from a trial of its own. Each trial has a
// model of its own; call this before that of `setup` loads its weights. A collective: all processes call it and come to
// the same result.
void require_memory(const TrainOptions& options, const TrainSetup& setup, const TrainerOptions& trainer_options,
                    const Agreement& agreement);

}  // namespace penstock::internal::cli
