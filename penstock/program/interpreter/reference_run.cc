#include "penstock/program/interpreter/reference_run.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <limits>
#include <map>
#include <utility>

#include "penstock/stage/accumulation.h"
#include "penstock/tensor/intra_op_threads.h"
#include "penstock/tensor/nested.h"
#include "penstock/tensor/random_scope.h"

namespace penstock::internal {
namespace {

// Returns for each stage the microbatches in the order of their weight gradients.
std::vector<std::vector<int>> gradient_order(const Schedule& schedule) {
  std::vector<std::vector<int>> order(static_cast<std::size_t>(schedule.stages()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      for_each_part(action, [&](const Action& part) {
        if (!part.is_compute() || !makes_weight_gradient(part)) return;
        order[static_cast<std::size_t>(part.stage)].push_back(part.microbatch);
      });
    }
  }
  return order;
}

Arguments copied(const Arguments& arguments) {
  const auto copy = [](const c10::IValue& leaf) {
    return leaf.isTensor() && leaf.toTensor().defined() ? c10::IValue(leaf.toTensor().clone()) : leaf;
  };
  Arguments copies = arguments;
  for (c10::IValue& value : copies.args) value = map_leaves(value, copy);
  for (auto& [name, value] : copies.kwargs) value = map_leaves(value, copy);
  return copies;
}

}  // namespace

at::Tensor sum_of_means(const c10::IValue& output) {
  at::Tensor loss = at::zeros({});
  for (const at::Tensor& tensor : extract_tensor_args(output)) {
    if (tensor.defined() && tensor.is_floating_point()) loss = loss + tensor.mean().to(at::kFloat);
  }
  return loss;
}

ReferenceRun run_reference(const Pipe& pipe, const Schedule& schedule, std::span<const Arguments> microbatches,
                           const ReferenceRunOptions& options) {
  const IntraOpThreads threads(options.intra_op_threads);
  const NamedTensors parameters = pipe.program().parameters();
  std::vector<at::Tensor> trainable;
  std::vector<std::string> names;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad()) continue;
    trainable.push_back(parameter);
    names.push_back(name);
  }
  ReferenceRun result;
  // Indexed by microbatch and parameter.
  std::vector<std::vector<at::Tensor>> gradients;
  for (std::size_t i = 0; i < microbatches.size(); ++i) {
    if (options.is_cancelled()) return result;
    const RandomScope scope(options.seed, options.step, static_cast<std::int64_t>(i), /*place=*/0);
    const Arguments arguments = copied(microbatches[i]);
    const c10::IValue output = pipe.program().run(arguments.args, arguments.kwargs);
    const at::Tensor loss = options.loss(output);
    auto& contributions = gradients.emplace_back(trainable.size());
    if (loss.requires_grad() && !trainable.empty()) {
      const at::Tensor seed = at::ones_like(loss) / static_cast<double>(microbatches.size());
      contributions = torch::autograd::grad({loss}, trainable, {seed}, /*retain_graph=*/false, /*create_graph=*/false,
                                            /*allow_unused=*/true);
    }
    result.outputs.push_back(flatten_args_detach(output).value);
    result.losses.push_back(loss.detach());
  }
  const std::vector<std::vector<int>> order = gradient_order(schedule);
  // The first stage that has a parameter determines the order of its sum.
  std::map<std::string, int> stage_of;
  for (int stage = pipe.num_stages() - 1; stage >= 0; --stage) {
    for (const auto& [name, tensor] : pipe.state_dict(stage)) stage_of[name] = stage;
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < names.size(); ++i) {
    at::Tensor sum;
    std::vector<at::Tensor> largest;
    for (const int microbatch : order[static_cast<std::size_t>(stage_of.at(names[i]))]) {
      const at::Tensor& contribution = gradients[static_cast<std::size_t>(microbatch)][i];
      if (!contribution.defined()) continue;
      sum = sum.defined() ? sum + contribution : contribution.clone();
      if (contribution.numel() > 0) {
        largest.push_back(at::linalg_vector_norm(dense(contribution), std::numeric_limits<double>::infinity()));
      }
    }
    if (!largest.empty()) result.largest_contributions[names[i]] = at::stack(largest).max().item<double>();
    if (sum.defined()) result.gradients.emplace(names[i], dense(sum));
  }
  return result;
}

}  // namespace penstock::internal
