// penstock train --dry-run: estimates memory, time and disk space of a run without writing anything.
#pragma once

#include <vector>

#include "penstock/cli/train/options.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {

// Runs an evaluation and two trial steps, and prints the stages and estimates of bubble, memory, time and checkpoint
// size. Every process of the run calls it, and the coordinator prints. Throws PipelineError.
void dry_run(Trainer& trainer, const std::vector<Batch>& held_out, const TrainOptions& options);

}  // namespace penstock::internal::cli
