// Trial steps that measure how much memory a training run needs, before it begins.
#pragma once

#include "penstock/cli/train/options.h"
#include "penstock/cli/train/setup.h"
#include "penstock/schedule/costs.h"
#include "penstock/schedule/graph.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/agreement.h"
#include "penstock/train/trainer.h"

namespace penstock::internal::cli {

// Measurements of two trial steps.
struct Trial {
  Costs costs;
  StageGraph graph;
};

// Trains two steps of one microbatch on a model of its own, with the weights of this process's stages, and frees it. A
// collective.
Trial run_trial(const TrainOptions& options, TrainerOptions trainer_options, const Agreement& agreement);

// Memory in bytes of the rank that needs most.
struct RankNeed {
  double bytes = 0;
  int rank = 0;
};
RankNeed max_of(const RankNeed& left, const RankNeed& right);

// Predicts the need of a schedule, for stages with the measured costs.
RankNeed need_of(const Schedule& schedule, const Trial& trial);

}  // namespace penstock::internal::cli
