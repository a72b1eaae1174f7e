#include "penstock/train/stage_checkpoints.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "penstock/base/deadline.h"
#include "penstock/base/text.h"
#include "penstock/device/host_copies.h"
#include "penstock/runtime/error.h"
#include "penstock/tensor/safetensors.h"
#include "penstock/tensor/state_dict.h"
#include "penstock/train/checkpoint_writer.h"
#include "penstock/train/gradients.h"

namespace penstock::internal {
namespace {

// Appends the tensors whose names are new: stages of one rank may share a parameter.
void add_new(const NamedTensors& tensors, NamedTensors& all) {
  for (const auto& named : tensors) {
    const auto has_name = [&](const auto& other) { return other.first == named.first; };
    if (std::ranges::none_of(all, has_name)) all.push_back(named);
  }
}

}  // namespace

StageCheckpoints::StageCheckpoints(const Schedule& schedule, const Model& model, TrainedStages& stages,
                                   const TrainingProcesses& processes, MemoryWatch& memory, bool sharded)
    : schedule_(schedule), model_(model), stages_(stages), processes_(processes), memory_(memory), sharded_(sharded) {}

std::vector<StageCheckpoints::HostTensors> StageCheckpoints::copy_to_host(const std::string& path) const {
  HostCopies copies;
  const auto copied = [&](const NamedTensors& tensors) {
    NamedTensors result;
    for (const auto& [name, tensor] : tensors) result.emplace_back(name, copies.start(tensor.detach()));
    return result;
  };
  std::vector<HostTensors> on_host;
  for (const TrainedStage& stage : std::as_const(stages_)) {
    on_host.push_back({.parameters = copied(stage.stage->parameters()),
                       .optimizer = copied(stage.optimizer.state()),
                       .buffers = copied(stage.stage->module().buffers)});
  }
  if (!copies.wait(deadline_after(processes_.timeout()))) {
    throw CheckpointError(path + ": is not written, because a device has not sent its tensors within the timeout.");
  }
  return on_host;
}

void StageCheckpoints::require_finite_parameters(const std::string& path,
                                                 const std::vector<HostTensors>& on_host) const {
  for (const TrainedStage& stage : std::as_const(stages_)) {
    for (const auto& [name, parameter] : on_host[stage.index].parameters) {
      if (std::isfinite(sum_of_squares(parameter))) continue;
      throw CheckpointError(concat(path, ": is not written, because parameter ", name, " of stage ",
                                   stage.stage->stage_index(),
                                   " is not finite; earlier checkpoints remain.\n  Hint: lower the learning rate or "
                                   "lower the clipping norm, and resume from the last of them."));
    }
  }
}

at::Tensor StageCheckpoints::local_shards(const TrainedStage& stage, const std::string& name,
                                          const std::vector<HostTensors>& on_host,
                                          NamedTensors HostTensors::* kind) const {
  std::vector<at::Tensor> shards;
  for (const TrainedStage& other : std::as_const(stages_)) {
    if (other.stage->stage_index() != stage.stage->stage_index()) continue;
    for (const auto& [other_name, shard] : on_host[other.index].*kind) {
      if (other_name == name) shards.push_back(shard);
    }
  }
  return at::cat(shards);
}

NamedTensors StageCheckpoints::unsharded(const TrainedStage& stage, const std::vector<HostTensors>& on_host,
                                         NamedTensors HostTensors::* kind) const {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : stage.stage->module().parameters) parameters.emplace(name, parameter);
  NamedTensors result;
  for (const auto& [full_name, tensor] : on_host[stage.index].*kind) {
    // "NAME" of a parameter, or "NAME.exp_avg" of optimizer state.
    std::string name = full_name;
    std::string suffix;
    if (!parameters.contains(name) && name.rfind('.') != std::string::npos) {
      suffix = name.substr(name.rfind('.'));
      name.resize(name.size() - suffix.size());
    }
    at::Tensor value = tensor;
    const auto parameter = parameters.find(name);
    const bool is_shard = sharded_ && parameter != parameters.end() && value.dim() > 0 &&
                          value.sizes() != parameter->second.sizes() && processes_.replicas() > 1;
    if (is_shard) {
      const at::Tensor gathered =
          processes_.are_threads() ? local_shards(stage, full_name, on_host, kind) : processes_.gather_shards(value);
      value = gathered.narrow(0, 0, parameter->second.numel()).view(parameter->second.sizes());
    }
    for (const std::string& alias : parameter == parameters.end() ? std::vector{name} : model_.names_of(name)) {
      result.emplace_back(alias + suffix, value);
    }
  }
  return result;
}

std::string StageCheckpoints::save(const std::string& directory, int keep, CheckpointInfo info) const {
  const CheckpointWriter writer(directory, info.step);
  std::exception_ptr failure;
  // Runs one phase on all processes. All of them take part in the collective at its end, even if one has failed.
  const auto run_phase = [&](const auto& act) {
    if (!failure) {
      try {
        act();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    bool any_failed = false;
    try {
      any_failed = processes_.sum({failure ? 1.0 : 0.0}).front() > 0;
    } catch (const PipelineError&) {
      if (!failure) throw;
    }
    // All ranks have completed this phase, so none still writes to the checkpoint.
    if ((failure || any_failed) && processes_.is_coordinator()) writer.discard();
    if (failure) std::rethrow_exception(failure);
    if (any_failed) throw CheckpointError(writer.path() + ": another rank could not write its part.");
  };
  std::vector<HostTensors> on_host;
  run_phase([&] {
    on_host = copy_to_host(writer.path());
    require_finite_parameters(writer.path(), on_host);
  });
  // Every replica takes part in gathering shards; the first replica writes.
  struct Part {
    NamedTensors weights;
    NamedTensors optimizer;
  };
  std::map<int, Part> parts;
  for (const TrainedStage& stage : std::as_const(stages_)) {
    NamedTensors weights = unsharded(stage, on_host, &HostTensors::parameters);
    const NamedTensors optimizer = unsharded(stage, on_host, &HostTensors::optimizer);
    if (stage.replica != 0) continue;
    for (const auto& [name, buffer] : on_host[stage.index].buffers) {
      for (const std::string& alias : model_.names_of(name)) weights.emplace_back(alias, buffer);
    }
    Part& part = parts[stage.rank];
    add_new(weights, part.weights);
    add_new(optimizer, part.optimizer);
  }
  run_phase([&] {
    if (processes_.is_coordinator()) writer.begin();
  });
  run_phase([&] {
    for (const auto& [rank, part] : parts) writer.write_part(rank, part.weights, part.optimizer);
  });
  run_phase([&] {
    if (!processes_.is_coordinator()) return;
    info.model = model_.description();
    info.non_persistent_buffers = model_.non_persistent_buffers();
    writer.finish(info, schedule_.ranks(), keep);
  });
  return writer.path();
}

std::int64_t StageCheckpoints::estimate_bytes(const OptimizerOptions& optimizer) const {
  double bytes = 0;
  for (const TrainedStage& stage : std::as_const(stages_)) {
    if (stage.replica != 0) continue;
    const auto add = [&](const std::string& name, std::int64_t size) {
      bytes += static_cast<double>(size) * static_cast<double>(model_.names_of(name).size());
    };
    for (const auto& [name, parameter] : stage.stage->module().parameters) {
      const std::int64_t size = parameter.numel() * static_cast<std::int64_t>(parameter.element_size());
      add(name, size + (parameter.requires_grad() ? state_bytes(optimizer, size) : 0));
    }
    for (const auto& [name, buffer] : stage.stage->module().buffers) {
      add(name, static_cast<std::int64_t>(buffer.nbytes()));
    }
  }
  return static_cast<std::int64_t>(processes_.sum({bytes}).front());
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
  ModelTensors tensors{.description = model_.description()};
  for (const std::string& name : model_.parameter_names()) tensors.names.insert(name);
  for (const std::string& name : model_.buffer_names()) tensors.names.insert(name);
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
