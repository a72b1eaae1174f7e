// Prepares steps: takes what the ranks of this process need of a batch, splits it into microbatches, and fills in the
// inputs of each replica.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "penstock/runtime/batch.h"
#include "penstock/runtime/local_ranks.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/runtime/step.h"
#include "penstock/runtime/step_state.h"

namespace penstock::internal {

class StepBuilder {
 public:
  // All arguments outlive this and the steps that it makes.
  StepBuilder(const PipelineOptions& options, const LocalRanks& ranks);

  // Returns a step, ready to run. `count` is the number of steps before it, which is its number unless the options set
  // one. Throws PipelineError if something is missing or does not fit, and ChunkError for what cannot be split.
  std::shared_ptr<Step> build(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                              const StepOptions& step_options, bool backward, std::int64_t count) const;

 private:
  int num_microbatches() const { return ranks_.schedule().microbatches(); }
  int last_stage() const { return ranks_.schedule().stages() - 1; }

  // Returns the values that stages of this process need.
  Batch batch_of(const Args& args, const Kwargs& kwargs, const c10::IValue& target,
                 const StepOptions& step_options) const;
  // Returns the devices on which the ranks compute, and those on which the caller has values of the batch, each once.
  std::vector<at::Device> devices_with(const Batch& batch, const StepOptions& step_options) const;
  // Throws PipelineError unless there are both a loss function and a target, or neither. Overrides may compute a loss
  // of their own.
  void require_loss_and_target(const Batch& batch) const;
  void require_weights(const StepOptions& step_options) const;
  // Returns a digest of everything that the shapes of messages depend on: see Transport::begin_step.
  std::uint64_t signature_of(const Batch& batch, bool backward) const;
  LossWeights weights_of(const StepOptions& step_options, std::size_t replica) const;
  // Sets the factors of thread ranks, of which all weights are in this process. Process ranks share their weights
  // first.
  void set_all_factors(std::vector<ReplicaStep>& replicas) const;

  const PipelineOptions& options_;
  const LocalRanks& ranks_;
  // Distinguishes the pipelines of this process in signatures: a pipeline that follows another one on the same
  // transport sends messages of its own shapes.
  std::int64_t pipeline_number_;
};

}  // namespace penstock::internal
