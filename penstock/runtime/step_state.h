// The state of one step: what it is given, what it computes, and what a rollback restores.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/device/streams.h"
#include "penstock/runtime/batch.h"
#include "penstock/runtime/device_times.h"
#include "penstock/runtime/failure_log.h"
#include "penstock/runtime/record.h"
#include "penstock/runtime/step.h"
#include "penstock/schedule/schedule.h"
#include "penstock/stage/saved_state.h"
#include "penstock/stage/wiring.h"

namespace penstock::internal {

// Weights of the microbatches' losses.
struct LossWeights {
  // PipelineOptions::loss_weight of each microbatch; empty without it. On process ranks, only the rank of the last
  // stage knows them before share_weights.
  std::vector<double> weights;
  // Factor of each microbatch's loss in the gradients.
  std::vector<double> factors;
  // Weight that gradients are divided by. If unset, it is the sum of all weights.
  std::optional<double> total;
  // False if gradients are those of the sum over microbatches, not of the mean.
  bool scale_grads = true;
  // True if the caller has set the factors, which then stay as they are.
  bool has_given_factors = false;
};

// Inputs of the ranks of one replica. They do not change while the ranks run their actions.
struct StepInputs {
  const Schedule* schedule = nullptr;
  const Wiring* wiring = nullptr;
  // True in step(), and false in eval().
  bool backward = false;
  // True if backwards are computed by autograd, not by overrides.
  bool autograd = false;
  std::vector<Batch> microbatches = {};
  bool has_target = false;
  LossWeights weights = {};
  LossFunction loss = nullptr;
  // Options of the step, with `number` set. Shared by all replicas.
  std::shared_ptr<const StepOptions> options = nullptr;
  const std::optional<c10::IValue>* output_merge_spec = nullptr;
  // Digest of everything that shapes of messages depend on: see Transport::begin_step.
  std::uint64_t signature = 0;
  std::uint64_t seed = 0;
  std::chrono::milliseconds timeout = {};
  Clock::time_point began = {};
  // The point in the caller's streams after which the step computes.
  StreamPoint caller = {};
};

// Results of the ranks of one replica. Each element is written by one rank only, so there is no lock.
struct StepOutputs {
  explicit StepOutputs(std::size_t microbatches)
      : outputs(microbatches), losses(microbatches), loss_terms(microbatches) {}

  // True if this process has the outputs.
  bool has_outputs = false;
  std::vector<c10::IValue> outputs;
  // Undefined on a process that does not have them.
  std::vector<at::Tensor> losses;
  // Terms of add_loss, by microbatch and stage.
  std::vector<std::map<int, std::vector<at::Tensor>>> loss_terms;
  // True if another process of the replica has loss terms. It is set only if no process has a loss function.
  bool has_terms_elsewhere = false;
};

struct ReplicaStep {
  StepInputs inputs;
  StepOutputs outputs;
  Record record;
  // Times of the actions on devices, by rank.
  std::vector<DeviceTimes> device_times;
};

// One step of all replicas of this process. A cancelled step outlives the call that began it until its last action has
// returned, so it is held by shared pointers.
struct Step {
  explicit Step(std::size_t local_ranks) : failures(local_ranks) {}

  const Schedule* schedule = nullptr;
  std::vector<ReplicaStep> replicas;
  // Devices on which the ranks compute, and those on which the caller has values of the batch.
  std::vector<at::Device> devices;
  // Values of the batch that backwards may reach, besides parameters: gradients of their leaves are saved too.
  std::vector<c10::IValue> batch_values;
  // Gradients and buffers from before the step.
  SavedState saved;
  Clock::time_point began = {};
  FailureLog failures;

  // Completes the records with the times of devices, for which it waits until the deadline. Called while no rank runs.
  void resolve_times(Deadline deadline) {
    for (ReplicaStep& replica : replicas) {
      for (std::size_t rank = 0; rank < replica.device_times.size(); ++rank) {
        replica.device_times[rank].resolve(replica.record[rank], began, deadline);
      }
    }
  }

  // Frees all but the records, which are read after the step.
  void drop_values() {
    batch_values.clear();
    for (ReplicaStep& replica : replicas) {
      replica.inputs = {};
      replica.outputs = StepOutputs(0);
    }
  }
};

}  // namespace penstock::internal
