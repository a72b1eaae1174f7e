// Trainer, as far as checkpoints go: what is written, put together over shards, and read into other ranks and stages.
#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/runtime/error.h"
#include "penstock/train/trainer.h"

namespace penstock::internal {

// The tensors of a stage as they are without shards, under all names that the model has for them. A shard's neighbours
// are those of the other replicas.
NamedTensors Trainer::whole(const Own& own, const NamedTensors& tensors) {
  std::map<std::string, at::Tensor> shapes;
  for (const auto& [name, parameter] : own.stage->module().parameters) shapes.emplace(name, parameter);
  NamedTensors result;
  for (const auto& [full_name, tensor] : tensors) {
    // "NAME" or "NAME.exp_avg".
    std::string name = full_name;
    std::string ending;
    if (!shapes.contains(name) && name.rfind('.') != std::string::npos) {
      ending = name.substr(name.rfind('.'));
      name.resize(name.size() - ending.size());
    }
    at::Tensor value = tensor.detach();
    const auto shape = shapes.find(name);
    const bool is_shard = options_.sharded && shape != shapes.end() && value.dim() > 0 &&
                          value.sizes() != shape->second.sizes() && num_replicas_ > 1;
    if (is_shard && peers_ != nullptr) {
      const at::Tensor all = at::empty({value.numel() * num_replicas_}, value.options());
      finish([&] { return peers_->all_gather(all, value.contiguous()); });
      value = all.narrow(0, 0, shape->second.numel()).view(shape->second.sizes());
    } else if (is_shard) {
      std::vector<at::Tensor> parts;
      for (const Own& other : own_) {
        if (other.stage->stage_index() != own.stage->stage_index()) continue;
        const auto find_in = [&](const NamedTensors& those) {
          for (const auto& [one, part] : those) {
            if (one == full_name) parts.push_back(part.detach());
          }
        };
        if (ending.empty()) {
          find_in(other.stage->parameters());
        } else {
          find_in(other.optimizer.state());
        }
      }
      value = at::cat(parts).narrow(0, 0, shape->second.numel()).view(shape->second.sizes());
    }
    for (const std::string& alias : shape == shapes.end() ? std::vector{name} : model().names_of(name)) {
      result.emplace_back(alias + ending, value);
    }
  }
  return result;
}

std::string Trainer::save(const std::string& folder, int keep, const std::string& configuration) {
  const CheckpointWriter writer(folder, steps_done_);
  std::exception_ptr failure;
  // All processes go through this in step, whether or not one of them has failed.
  const auto together = [&](const auto& act) {
    if (!failure) {
      try {
        act();
      } catch (...) {
        failure = std::current_exception();
      }
    }
    bool failed = false;
    try {
      failed = summed({failure ? 1.0 : 0.0}).front() > 0;
    } catch (const PipelineError&) {
      if (!failure) throw;
    }
    // All ranks have ended this phase, so nobody writes to it any more.
    if ((failure || failed) && speaks()) writer.discard();
    if (failure) std::rethrow_exception(failure);
    if (failed) throw CheckpointError(writer.path() + ": another rank could not write its part.");
  };
  together([&] { require_finite_parameters(writer.path()); });
  const Schedule& schedule = pipeline_->schedule();
  // Shards are put together by all; the first replica writes.
  std::map<int, std::pair<NamedTensors, NamedTensors>> parts;
  for (const Own& own : own_) {
    NamedTensors weights = whole(own, own.stage->parameters());
    NamedTensors optimizer = whole(own, own.optimizer.state());
    if (own.replica != 0) continue;
    auto& part = parts[schedule.placement().rank_of(own.stage->stage_index())];
    for (const auto& [name, buffer] : own.stage->module().buffers) {
      for (const std::string& alias : model().names_of(name)) weights.emplace_back(alias, buffer.detach());
    }
    // Stages of a rank may share a parameter.
    const auto add = [](const NamedTensors& from, NamedTensors& to) {
      for (const auto& [name, tensor] : from) {
        const auto same = [&](const auto& one) { return one.first == name; };
        if (std::ranges::none_of(to, same)) to.emplace_back(name, tensor);
      }
    };
    add(weights, part.first);
    add(optimizer, part.second);
  }
  together([&] {
    if (speaks()) writer.begin();
  });
  together([&] {
    for (const auto& [rank, part] : parts) writer.write_part(rank, part.first, part.second);
  });
  together([&] {
    if (!speaks()) return;
    writer.finish({.step = steps_done_,
                   .run = run_,
                   .model = model().description(),
                   .configuration = configuration,
                   .non_persistent_buffers = model().non_persistent_buffers()},
                  schedule.ranks(), keep);
  });
  return writer.path();
}

std::int64_t Trainer::checkpoint_bytes() {
  double bytes = 0;
  for (const Own& own : own_) {
    if (own.replica != 0) continue;
    const auto add = [&](const std::string& name, std::int64_t size) {
      bytes += static_cast<double>(size) * static_cast<double>(model().names_of(name).size());
    };
    for (const auto& [name, parameter] : own.stage->module().parameters) {
      const std::int64_t size = parameter.numel() * static_cast<std::int64_t>(parameter.element_size());
      add(name, size + (parameter.requires_grad() ? state_bytes(options_.optimizer, size) : 0));
    }
    for (const auto& [name, buffer] : own.stage->module().buffers)
      add(name, static_cast<std::int64_t>(buffer.nbytes()));
  }
  return static_cast<std::int64_t>(summed({bytes}).front());
}

std::vector<StageSize> Trainer::stage_sizes() {
  std::vector<double> numbers(2 * static_cast<std::size_t>(pipeline_->schedule().stages()), 0);
  for (const Own& own : own_) {
    if (own.replica != 0) continue;
    const std::size_t first = 2 * static_cast<std::size_t>(own.stage->stage_index());
    for (const auto& [name, parameter] : own.stage->module().parameters) {
      numbers[first] += 1;
      numbers[first + 1] += static_cast<double>(parameter.numel());
    }
  }
  numbers = summed(std::move(numbers));
  std::vector<StageSize> sizes;
  for (std::size_t i = 0; i < numbers.size(); i += 2) {
    sizes.push_back(
        {.parameters = static_cast<std::int64_t>(numbers[i]), .elements = static_cast<std::int64_t>(numbers[i + 1])});
  }
  return sizes;
}

// What a stage keeps of a tensor: all, or its replica's shard.
at::Tensor Trainer::part_for(const Own& own, const std::string& name, const at::Tensor& whole_tensor) const {
  for (const auto& [one, tensor] : own.stage->parameters()) {
    if (one != name || tensor.sizes() == whole_tensor.sizes() || whole_tensor.dim() == 0) continue;
    const std::int64_t length = tensor.numel();
    at::Tensor part = at::zeros({length}, whole_tensor.options());
    const std::int64_t begin = std::min(own.replica * length, whole_tensor.numel());
    const std::int64_t count = std::min(length, whole_tensor.numel() - begin);
    part.narrow(0, 0, count).copy_(whole_tensor.reshape(-1).narrow(0, begin, count));
    return part;
  }
  return whole_tensor.clone();
}

void Trainer::load(const Checkpoint& checkpoint) {
  // All that is needed is there, before anything changes.
  ModelTensors tensors{.description = model().description()};
  for (const std::string& name : model().parameter_names()) tensors.names.insert(name);
  for (const std::string& name : model().buffer_names()) tensors.names.insert(name);
  for (const Own& own : own_) {
    for (const auto& [name, parameter] : own.stage->module().parameters) tensors.needed[name] = parameter;
    for (const auto& [name, buffer] : own.stage->module().buffers) tensors.needed[name] = buffer;
  }
  checkpoint.require_model(tensors);
  const c10::NoGradGuard no_grad;
  for (Own& own : own_) {
    // The optimizer's state is the rank's.
    const int rank = pipeline_->schedule().placement().rank_of(own.stage->stage_index());
    const MemoryWatch::Scope scope(memory_, rank, options_.transport == nullptr ? own.replica : 0);
    for (const auto& [name, parameter] : own.stage->parameters()) {
      parameter.detach().copy_(part_for(own, name, checkpoint.weight(name)));
    }
    for (const auto& [name, buffer] : own.stage->module().buffers) buffer.copy_(checkpoint.weight(name));
    own.optimizer.load([&](const std::string& name) -> std::optional<at::Tensor> {
      const std::optional<at::Tensor> state = checkpoint.optimizer_state(name);
      if (!state) return std::nullopt;
      return part_for(own, name.substr(0, name.rfind('.')), *state);
    });
  }
  run_ = checkpoint.info().run;
  steps_done_ = checkpoint.info().step;
}

}  // namespace penstock::internal
