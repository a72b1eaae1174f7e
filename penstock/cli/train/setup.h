// Builds the parts of a training run from the options of `penstock train`.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "penstock/cli/train/options.h"
#include "penstock/program/program.h"
#include "penstock/schedule/schedule.h"
#include "penstock/train/data.h"
#include "penstock/train/model.h"

namespace penstock::internal::cli {

struct TrainSetup {
  // One model for each replica of this process.
  std::vector<std::unique_ptr<Model>> replicas;
  // The exported model, if there is one. The data refer to it.
  std::unique_ptr<const Program> program;
  std::unique_ptr<Data> data;
  std::optional<Schedule> schedule;
};

// Reads the model, cuts it, opens the data and makes the schedule. Throws std::runtime_error and the errors of these
// layers.
TrainSetup set_up(const TrainOptions& options, int replicas);

// Returns the schedule of the run for a model of this many stages. Throws ProgramError if they do not fit together.
Schedule make_schedule(const TrainOptions& options, int stages);

// Checks that all batches can be split as the run splits them. Throws DataError.
void require_splittable(const TrainSetup& setup, const TrainOptions& options, bool between_processes);

}  // namespace penstock::internal::cli
