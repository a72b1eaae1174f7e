#include "penstock/train/stage_checkpoints.h"

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "penstock/base/deadline.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/tensor/state_dict.h"

namespace penstock::internal {
namespace {

// Longest time that a run which has failed waits for copies from devices, which may be what has failed.
constexpr std::chrono::seconds kCopyTimeAfterFailure{5};

}  // namespace

StageCheckpoints::StageCheckpoints(const Schedule& schedule, const Model& model, TrainedStages& stages,
                                   const TrainingProcesses& processes, MemoryWatch& memory, bool sharded)
    : stages_(stages),
      memory_(memory),
      source_{.schedule = schedule, .model = model, .stages = stages, .processes = processes, .sharded = sharded} {}

void StageCheckpoints::start(const std::string& directory, int keep, CheckpointInfo info) {
  const auto use = memory_.has_devices() ? StageSnapshot::Use::BesideTraining : StageSnapshot::Use::BeforeTraining;
  in_flight_ = std::make_unique<CheckpointSave>(source_, streams_, directory, keep, std::move(info), use);
}

std::optional<SavedCheckpoint> StageCheckpoints::advance(const std::function<bool(CheckpointSave&)>& act) {
  if (!in_flight_) return std::nullopt;
  const auto release = c10::make_scope_exit([this] {
    if (in_flight_->has_ended()) in_flight_.reset();
  });
  if (!act(*in_flight_)) return std::nullopt;
  return SavedCheckpoint{.step = in_flight_->step(), .path = in_flight_->path()};
}

std::optional<SavedCheckpoint> StageCheckpoints::poll() {
  return advance([](CheckpointSave& save) { return save.poll(); });
}

std::optional<SavedCheckpoint> StageCheckpoints::finish() {
  return advance([](CheckpointSave& save) {
    save.finish();
    return true;
  });
}

std::optional<SavedCheckpoint> StageCheckpoints::finish_after_failure() {
  return advance([](CheckpointSave& save) { return save.finish_after_failure(deadline_after(kCopyTimeAfterFailure)); });
}

void StageCheckpoints::block_forwards() const {
  if (in_flight_) in_flight_->snapshot().block_forwards();
}

void StageCheckpoints::block_updates() const {
  if (in_flight_) in_flight_->snapshot().block_updates();
}

std::int64_t StageCheckpoints::estimate_bytes(const OptimizerOptions& optimizer) const {
  double bytes = 0;
  for (const TrainedStage& stage : source_.stages) {
    if (stage.replica != 0) continue;
    const auto add = [&](const std::string& name, std::int64_t size) {
      bytes += static_cast<double>(size) * static_cast<double>(source_.model.names_of(name).size());
    };
    for (const auto& [name, parameter] : stage.stage->module().parameters) {
      const std::int64_t size = parameter.numel() * static_cast<std::int64_t>(parameter.element_size());
      add(name, size + (parameter.requires_grad() ? state_bytes(optimizer, size) : 0));
    }
    for (const auto& [name, buffer] : stage.stage->module().buffers) {
      add(name, static_cast<std::int64_t>(buffer.nbytes()));
    }
  }
  return static_cast<std::int64_t>(source_.processes.sum({bytes}).front());
}

at::Tensor StageCheckpoints::stored_part(const TrainedStage& stage, const std::string& name, const at::Tensor& whole) {
  for (const auto& [other_name, tensor] : stage.stage->parameters()) {
    if (other_name != name || tensor.sizes() == whole.sizes() || whole.dim() == 0) continue;
    const std::int64_t length = tensor.numel();
    at::Tensor shard = at::zeros({length}, whole.options());
    const std::int64_t begin = std::min(stage.replica * length, whole.numel());
    const std::int64_t count = std::min(length, whole.numel() - begin);
    shard.narrow(0, 0, count).copy_(whole.reshape(-1).narrow(0, begin, count));
    return shard;
  }
  return whole.clone();
}

void StageCheckpoints::load(const Checkpoint& checkpoint) {
  ModelTensors tensors{.description = source_.model.description()};
  for (const std::string& name : source_.model.parameter_names()) tensors.names.insert(name);
  for (const std::string& name : source_.model.buffer_names()) tensors.names.insert(name);
  for (const TrainedStage& stage : stages_) {
    for (const auto& [name, parameter] : stage.stage->module().parameters) tensors.needed[name] = parameter;
    for (const auto& [name, buffer] : stage.stage->module().buffers) tensors.needed[name] = buffer;
  }
  checkpoint.require_model(tensors);
  const c10::NoGradGuard no_grad;
  for (TrainedStage& stage : stages_) {
    // Optimizer state counts as memory of the stage's rank.
    const MemoryWatch::Scope scope(memory_, stage.rank, stage.local_replica);
    for (const auto& [name, parameter] : stage.stage->parameters()) {
      parameter.detach().copy_(stored_part(stage, name, checkpoint.weight(name)));
      release_pages(checkpoint.weight(name));
    }
    for (const auto& [name, buffer] : stage.stage->module().buffers) load_tensor(buffer, checkpoint.weight(name));
    stage.optimizer.load([&](const std::string& name) -> std::optional<at::Tensor> {
      const std::optional<at::Tensor> state = checkpoint.optimizer_state(name);
      if (!state) return std::nullopt;
      at::Tensor part = stored_part(stage, name.substr(0, name.rfind('.')), *state);
      release_pages(*state);
      // The step count stays in host memory.
      return part.dim() == 0 && part.scalar_type() == at::kLong ? part : part.to(stage.stage->device());
    });
  }
}

}  // namespace penstock::internal
