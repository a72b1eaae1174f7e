// Trainer, as far as gradients go: their norm, clipping, and what is not finite.
#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <future>
#include <iterator>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/stage/accumulation.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/train/trainer.h"

namespace penstock::internal {
namespace {

// In float64, and in an order that depends on the number of elements alone.
double sum_of_squares(const at::Tensor& tensor) {
  const at::Tensor real = as_real(tensor.detach());
  if (real.scalar_type() != at::kFloat || !real.is_contiguous() || !real.is_cpu()) {
    return real.to(at::kDouble).square().sum().item<double>();
  }
  // Without a copy in float64, which takes several times as long.
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

}  // namespace

// For each of a stage's parameters, its place among all names. A parameter counts once: in the first of the stages that
// share it, and in the first replica unless each has a shard of it.
std::vector<std::optional<std::size_t>> Trainer::positions_in(const PipelineStage& stage, std::int64_t replica) const {
  const SharedParameters shared = model().shared_parameters();
  std::vector<std::optional<std::size_t>> positions;
  for (const auto& [name, parameter] : stage.parameters()) {
    const SharedParameter here{.stage = stage.stage_index(), .name = name};
    const bool counts_elsewhere = std::ranges::any_of(shared, [&](const std::vector<SharedParameter>& places) {
      return places.front() != here && std::ranges::find(places, here) != places.end();
    });
    const bool is_whole =
        std::ranges::any_of(stage.module().parameters, [&](const auto& own) { return own.second.is_same(parameter); });
    const auto found = std::ranges::find(names_, name);
    positions.emplace_back();
    if (counts_elsewhere || (is_whole && replica != 0) || found == names_.end()) continue;
    positions.back() = static_cast<std::size_t>(found - names_.begin());
  }
  return positions;
}

void Trainer::for_each_own(const std::function<void(Own& own)>& act) {
  const Placement& placement = pipeline_->schedule().placement();
  std::map<std::pair<int, int>, std::vector<Own*>> by_rank;
  for (Own& own : own_) by_rank[{own.replica, placement.rank_of(own.stage->stage_index())}].push_back(&own);
  const auto run = [&](const std::pair<int, int>& place, const std::vector<Own*>& all) {
    const IntraOpThreads threads(options_.intra_op_threads);
    const bool is_only_one = options_.transport != nullptr;
    const MemoryWatch::Scope scope(memory_, place.second, is_only_one ? 0 : place.first);
    for (Own* own : all) act(*own);
  };
  std::vector<std::future<void>> others;
  for (auto it = std::next(by_rank.begin()); it != by_rank.end(); ++it) {
    others.push_back(std::async(std::launch::async, [&run, it] { run(it->first, it->second); }));
  }
  run(by_rank.begin()->first, by_rank.begin()->second);
  for (std::future<void>& other : others) other.get();
}

std::vector<double> Trainer::squares_of_gradients() {
  for_each_own([&](Own& own) {
    const c10::NoGradGuard no_grad;
    const NamedTensors& parameters = own.stage->parameters();
    own.squares.assign(parameters.size(), 0);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& gradient = parameters[i].second.mutable_grad();
      if (!gradient.defined()) continue;
      gradient = dense(gradient);
      if (own.positions[i]) own.squares[i] = sum_of_squares(gradient);
    }
  });
  std::vector<double> squares(names_.size(), 0);
  for (const Own& own : own_) {
    for (std::size_t i = 0; i < own.squares.size(); ++i) {
      if (own.positions[i]) squares[*own.positions[i]] += own.squares[i];
    }
  }
  return squares;
}

void Trainer::scale_gradients(double factor) {
  for_each_own([&](Own& own) {
    const c10::NoGradGuard no_grad;
    for (const auto& [name, parameter] : own.stage->parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    }
  });
}

// Also what earlier batches of the step have left.
void Trainer::drop_gradients() {
  for (const Own& own : own_) {
    for (const auto& [name, parameter] : own.stage->parameters()) parameter.mutable_grad().reset();
  }
}

std::vector<int> Trainer::stages_of_parameters() {
  std::vector<double> stages(names_.size(), 0);
  for (const Own& own : own_) {
    for (const std::optional<std::size_t>& position : own.positions) {
      // A shard is in every replica, and one of them tells.
      if (position && own.replica == 0) stages[*position] = own.stage->stage_index();
    }
  }
  const std::vector<double> all = summed(std::move(stages));
  return {all.begin(), all.end()};
}

std::string Trainer::nonfinite_loss(const std::string& name, std::size_t index, const Share& share, double loss) const {
  if (share.weight == 0 || std::isfinite(loss)) return "";
  const auto microbatches = static_cast<std::size_t>(pipeline_->schedule().microbatches());
  return (name.empty() ? "" : ", " + name) + ", microbatch " + std::to_string(index % microbatches) +
         (num_replicas_ > 1 ? " of replica " + std::to_string(index / microbatches) : "") + " (rows " +
         std::to_string(share.first_row) + " to " + std::to_string(share.first_row + share.rows - 1) + "), stage " +
         std::to_string(pipeline_->schedule().stages() - 1) + ": the loss is " +
         (std::isnan(loss) ? "NaN" : "infinite") + ".";
}

std::string Trainer::nonfinite_in(const StepBatches& batches, const Figures& figures) {
  const std::string step = "step " + std::to_string(steps_done_ + 1);
  const std::vector<int> stages = stages_of_parameters();
  std::string text;
  std::size_t next = 0;
  const std::string names = batches.names();
  for (std::size_t part = 0; part < batches.batches.size(); ++part) {
    for (std::size_t i = 0; i < batches.shares[part].size(); ++i) {
      const double loss = figures.losses[next++];
      if (text.empty()) text = nonfinite_loss(batches.batches[part].name, i, batches.shares[part][i], loss);
    }
  }
  if (!text.empty()) text.insert(0, step);
  const auto bad = std::ranges::find_if(figures.squares, [](double square) { return !std::isfinite(square); });
  if (bad == figures.squares.end())
    return text.empty() ? step + names + ": the norm of all gradients overflows." : text;
  const auto position = static_cast<std::size_t>(bad - figures.squares.begin());
  const std::string parameter = names_[position] + " of stage " + std::to_string(stages[position]);
  if (!text.empty()) return text + "\n  The first parameter whose gradient is not finite is " + parameter + ".";
  return step + names + ", stage " + std::to_string(stages[position]) + ": the gradient of " + names_[position] +
         " is not finite; the losses are.";
}

SavedState Trainer::saved_buffers() const {
  SavedState saved;
  for (const Own& own : own_) {
    for (const auto& [name, buffer] : own.stage->module().buffers) saved.add_values(buffer);
  }
  return saved;
}

void Trainer::require_finite_parameters(const std::string& path) const {
  for (const Own& own : own_) {
    for (const auto& [name, parameter] : own.stage->parameters()) {
      if (std::isfinite(sum_of_squares(parameter))) continue;
      throw CheckpointError(path + ": is not written, because parameter " + name + " of stage " +
                            std::to_string(own.stage->stage_index()) +
                            " is not finite; earlier checkpoints stay.\n  Hint: resume from the last of them with a "
                            "smaller --learning-rate or --clip.");
    }
  }
}

}  // namespace penstock::internal
