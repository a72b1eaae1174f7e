// penstock train --dry-run: what a run would be, and what it would take, without writing anything.
#pragma once

#include <vector>

#include "penstock/cli/train/options.h"
#include "penstock/train/trainer.h"

namespace penstock::cli {

// Tries an evaluation, runs two trial steps and prints the cut, the schedule, and estimates of memory, time and checkpoints. All processes call
// it; the one that is the coordinator prints. Throws PipelineError.
void dry_run(Trainer& trainer, const std::vector<Batch>& held_out, const TrainOptions& options);

}  // namespace penstock::cli
