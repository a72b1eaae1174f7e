// --memory: refuses a run whose ranks would need more memory than there is.
#pragma once

#include "penstock/cli/train/options.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {

// Trains two steps with the first microbatch of each batch, on a model of their own, and predicts from what these need what
// each rank needs for `schedule`. Throws std::runtime_error if that is more than --memory, with options under which it
// would fit. All processes call it, and come to the same result.
void require_memory(const TrainOptions& options, const Schedule& schedule, const TrainerOptions& trainer_options);

}  // namespace penstock::internal::cli
