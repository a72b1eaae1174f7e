#include "penstock/train/step_batches.h"

#include <cstddef>
#include <exception>

#include "penstock/base/text.h"
#include "penstock/device/host_copies.h"
#include "penstock/runtime/error.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/reason.h"

namespace penstock::internal {

std::vector<MicrobatchShare> microbatch_shares(const Data& data, const Batch& batch, int replicas, int microbatches) {
  std::vector<MicrobatchShare> shares;
  try {
    std::vector<Batch> parts{batch};
    if (replicas > 1) parts = split_batch(batch, {}, replicas, "replicas");
    std::int64_t row = 0;
    for (const Batch& part : parts) {
      for (const Batch& microbatch : split_batch(part, {}, microbatches, "microbatches")) {
        const std::int64_t rows = rows_of(microbatch);
        shares.push_back({.weight = data.loss_weight(microbatch), .first_row = row, .rows = rows});
        row += rows;
      }
    }
  } catch (const std::exception& error) {
    throw DataError((batch.name.empty() ? "" : batch.name + ": ") + reason_of(error));
  }
  return shares;
}

std::string StepBatches::names() const {
  std::string names;
  for (const Batch& batch : batches) {
    if (!batch.name.empty()) names += ", " + batch.name;
  }
  return names;
}

StepBatches read_step_batches(const Data& data, std::int64_t first, int count, int replicas, int microbatches) {
  StepBatches step;
  for (int i = 0; i < count; ++i) {
    const Batch& batch = step.batches.emplace_back(data.batch(first + i));
    const auto& shares = step.shares.emplace_back(microbatch_shares(data, batch, replicas, microbatches));
    for (const MicrobatchShare& share : shares) step.weight += share.weight;
  }
  return step;
}

Batch pinned_batch(Batch batch) {
  const auto pin = [](const c10::IValue& value) {
    return map_leaves(
        value, [](const c10::IValue& leaf) { return leaf.isTensor() ? c10::IValue(pinned(leaf.toTensor())) : leaf; });
  };
  for (c10::IValue& value : batch.args) value = pin(value);
  for (auto& [stage, kwargs] : batch.kwargs) {
    for (auto& [name, value] : kwargs) value = pin(value);
  }
  batch.target = pin(batch.target);
  return batch;
}

StepResult run_named(const Batch& batch, const std::vector<MicrobatchShare>& shares, int microbatches,
                     const std::function<StepResult()>& act) {
  try {
    return act();
  } catch (const PipelineError& error) {
    if (batch.name.empty() || !error.place()) throw;
    // In an evaluation, every process replica runs the whole batch, so there are no shares of later replicas.
    const std::size_t index =
        static_cast<std::size_t>(error.place()->replica) * static_cast<std::size_t>(microbatches) +
        static_cast<std::size_t>(error.place()->microbatch);
    const MicrobatchShare& share = shares[index % shares.size()];
    throw PipelineError(
        concat(batch.name, ", rows ", share.first_row, " to ", share.first_row + share.rows - 1, ": ", error.what()),
        error.place());
  }
}

}  // namespace penstock::internal
