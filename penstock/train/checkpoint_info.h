// The error type of checkpoints, and the description that each checkpoint has.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/train/grad_scaler.h"

namespace penstock::internal {

// Thrown when a checkpoint cannot be written, read or removed, or does not fit the model. The message names the file
// and the problem, and ends with a hint where there is something to do.
class CheckpointError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CheckpointInfo {
  // Number of completed training steps.
  std::int64_t step = 0;
  // Id of the training run, which distinguishes its checkpoints from those of other runs. A resumed run keeps its id.
  std::string run = {};
  // Model::description, one line.
  std::string model = {};
  // JSON object that the caller stores with the checkpoint, such as the options of the run.
  std::string configuration = "{}";
  // State of the gradient scaler of a run in float16.
  std::optional<GradScaler::State> grad_scaler = std::nullopt;
  // Names of weights that the model's state_dict leaves out.
  std::vector<std::string> non_persistent_buffers = {};
};

// Returns a random id for CheckpointInfo::run: 32 hexadecimal digits.
std::string new_run_id();

}  // namespace penstock::internal
