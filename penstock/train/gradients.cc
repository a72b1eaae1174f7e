#include "penstock/train/gradients.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <span>
#include <utility>

#include "penstock/stage/accumulation.h"
#include "penstock/stage/shared.h"
#include "penstock/train/optimizer.h"

namespace penstock::internal {
namespace {

using Positions = std::vector<std::optional<std::size_t>>;

// Returns the index of each of a stage's parameters among all names. A parameter counts once: in the first of the
// stages that share it, and in the first replica unless each replica has a shard of it.
Positions positions_in(const TrainedStage& trained, const SharedParameters& shared,
                       const std::map<std::string, std::size_t>& index_of) {
  const PipelineStage& stage = *trained.stage;
  Positions positions;
  for (const auto& [name, parameter] : stage.parameters()) {
    const SharedParameter here{.stage = stage.stage_index(), .name = name};
    const bool counts_elsewhere = std::ranges::any_of(shared, [&](const std::vector<SharedParameter>& places) {
      return places.front() != here && std::ranges::find(places, here) != places.end();
    });
    const at::Tensor& tensor = parameter;
    const bool is_whole =
        std::ranges::any_of(stage.module().parameters, [&](const auto& whole) { return whole.second.is_same(tensor); });
    const auto found = index_of.find(name);
    positions.emplace_back();
    if (counts_elsewhere || (is_whole && trained.replica != 0) || found == index_of.end()) continue;
    positions.back() = found->second;
  }
  return positions;
}

}  // namespace

double sum_of_squares(const at::Tensor& tensor) {
  const at::Tensor real = as_real(tensor.detach());
  if (real.scalar_type() != at::kFloat || !real.is_contiguous() || !real.is_cpu()) {
    return real.to(at::kDouble).square().sum().item<double>();
  }
  // The loop avoids a copy in float64, which takes several times as long.
  constexpr std::size_t kLanes = 8;
  std::array<double, kLanes> sums{};
  const std::span<const float> numbers(real.const_data_ptr<float>(), static_cast<std::size_t>(real.numel()));
  std::size_t i = 0;
  for (; i + kLanes <= numbers.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const auto number = static_cast<double>(numbers[i + lane]);
      sums[lane] += number * number;
    }
  }
  double sum = 0;
  for (; i < numbers.size(); ++i) sum += static_cast<double>(numbers[i]) * static_cast<double>(numbers[i]);
  for (const double lane : sums) sum += lane;
  return sum;
}

Gradients::Gradients(TrainedStages& stages, const Model& model) : stages_(stages) {
  const std::vector<std::string> names = model.parameter_names();
  parameter_count_ = names.size();
  std::map<std::string, std::size_t> index_of;
  for (std::size_t i = 0; i < names.size(); ++i) index_of.emplace(names[i], i);
  const SharedParameters shared = model.shared_parameters();
  for (const TrainedStage& stage : std::as_const(stages)) positions_.push_back(positions_in(stage, shared, index_of));
}

void Gradients::compute_squares(DeviceNumbers& numbers) {
  // Each rank writes to the elements of its own stages.
  squares_or_norms_.assign(stages_.size(), {});
  std::vector<std::vector<at::Tensor>> on_devices(stages_.size());
  stages_.for_each_in_parallel([&](TrainedStage& stage) {
    const c10::NoGradGuard no_grad;
    const NamedTensors& parameters = stage.stage->parameters();
    const Positions& positions = positions_[stage.index];
    std::vector<double>& squares = squares_or_norms_[stage.index];
    squares.assign(parameters.size(), 0);
    on_devices[stage.index].resize(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& gradient = parameters[i].second.mutable_grad();
      if (!gradient.defined()) continue;
      gradient = dense(gradient);
      if (!positions[i]) continue;
      if (gradient.is_cpu()) {
        squares[i] = sum_of_squares(gradient);
      } else {
        // One kernel, without a copy in float64.
        on_devices[stage.index][i] =
            at::linalg_vector_norm(as_real(gradient.detach()), 2, std::nullopt, /*keepdim=*/false, at::kDouble);
      }
    }
  });
  for (std::size_t stage = 0; stage < on_devices.size(); ++stage) {
    for (std::size_t i = 0; i < on_devices[stage].size(); ++i) {
      if (on_devices[stage][i].defined()) numbers.add(on_devices[stage][i], &squares_or_norms_[stage][i]);
    }
  }
}

std::vector<double> Gradients::squares() const {
  // The order of these additions does not depend on which rank finishes first.
  std::vector<double> squares(parameter_count_, 0);
  for (const TrainedStage& stage : std::as_const(stages_)) {
    const std::vector<double>& found = squares_or_norms_[stage.index];
    const Positions& positions = positions_[stage.index];
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (positions[i]) squares[*positions[i]] += stage.stage->device().is_cpu() ? found[i] : found[i] * found[i];
    }
  }
  return squares;
}

void Gradients::clip(double norm, double max_norm, double factor) {
  if (max_norm > 0 && norm > max_norm) factor *= max_norm / norm;
  if (factor == 1) return;
  stages_.for_each_in_parallel([&](TrainedStage& stage) {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, parameter] : stage.stage->parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    }
  });
}

void Gradients::discard() {
  for (const TrainedStage& stage : stages_) {
    for (const auto& [name, parameter] : stage.stage->parameters()) parameter.mutable_grad().reset();
  }
}

std::vector<int> Gradients::stages_of_parameters(const TrainingProcesses& processes) const {
  std::vector<double> stages(parameter_count_, 0);
  for (const TrainedStage& stage : std::as_const(stages_)) {
    // Every replica has a shard of a sharded parameter, and the sum must count one of them.
    if (stage.replica != 0) continue;
    for (const std::optional<std::size_t>& position : positions_[stage.index]) {
      if (position) stages[*position] = stage.stage->stage_index();
    }
  }
  const std::vector<double> sums = processes.sum(std::move(stages));
  return {sums.begin(), sums.end()};
}

}  // namespace penstock::internal
