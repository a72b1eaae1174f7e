// The batches of a training step, and how each is divided into microbatches.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "penstock/runtime/batch.h"
#include "penstock/runtime/step.h"
#include "penstock/train/data.h"

namespace penstock::internal {

// One microbatch of a batch: its rows, and the weight of its loss in the mean (Data::loss_weight).
struct MicrobatchShare {
  double weight = 0;
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
};

// Returns the microbatches of a batch, those of the first replica first, divided as the pipeline does it. Throws
// DataError, which names the batch, if it cannot be divided.
std::vector<MicrobatchShare> microbatch_shares(const Data& data, const Batch& batch, int replicas, int microbatches);

struct StepBatches {
  std::vector<Batch> batches;
  // Microbatches of each batch.
  std::vector<std::vector<MicrobatchShare>> shares;
  // Sum of the weights of all microbatches.
  double weight = 0;

  // Returns ", a.safetensors, b.safetensors", without batches that have no name.
  std::string names() const;
};

// Reads the batches of a step, which are numbered from `first` on. Throws DataError.
StepBatches read_step_batches(const Data& data, std::int64_t first, int count, int replicas, int microbatches);

// Returns the batch with its tensors in pinned memory, from which copies to devices run beside the host.
Batch pinned_batch(Batch batch);

// Returns the result of `act`, which runs a batch through the pipeline. A PipelineError that names a microbatch is
// rethrown with the batch's name and the microbatch's rows.
StepResult run_named(const Batch& batch, const std::vector<MicrobatchShare>& shares, int microbatches,
                     const std::function<StepResult()>& act);

}  // namespace penstock::internal
