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
#include <memory>
#include <optional>
#include <utility>

#include "penstock/program/interpreter/program_state.h"
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

// Sums what microbatches contribute to a gradient in a given order. Contributions that come early are kept until then.
class OrderedSum {
 public:
  // `order` outlives the sum.
  explicit OrderedSum(const std::vector<int>& order) : order_(&order) {}

  // Adds the contribution of a microbatch, which may be undefined.
  void add(int microbatch, at::Tensor contribution) {
    waiting_.emplace(microbatch, std::move(contribution));
    for (; next_ < order_->size(); ++next_) {
      const auto found = waiting_.find((*order_)[next_]);
      if (found == waiting_.end()) return;
      if (found->second.defined()) add_next(found->second);
      waiting_.erase(found);
    }
  }
  // Returns the sum, undefined if there was no contribution.
  const at::Tensor& sum() const { return sum_; }
  // Returns the largest absolute element of a contribution; none without any.
  std::optional<double> largest() const {
    return largest_.empty() ? std::nullopt : std::optional(at::stack(largest_).max().item<double>());
  }

 private:
  void add_next(const at::Tensor& contribution) {
    sum_ = sum_.defined() ? sum_ + contribution : contribution.clone();
    if (contribution.numel() == 0) return;
    largest_.push_back(at::linalg_vector_norm(dense(contribution), std::numeric_limits<double>::infinity()));
  }

  const std::vector<int>* order_;
  std::size_t next_ = 0;
  std::map<int, at::Tensor> waiting_;
  at::Tensor sum_;
  std::vector<at::Tensor> largest_;
};

Arguments copied(const Arguments& arguments, at::Device device) {
  const auto copy = [device](const c10::IValue& leaf) {
    if (!leaf.isTensor() || !leaf.toTensor().defined()) return leaf;
    const at::Tensor& tensor = leaf.toTensor();
    return c10::IValue(tensor.device() == device ? tensor.clone() : tensor.to(device));
  };
  Arguments copies = arguments;
  for (c10::IValue& value : copies.args) value = map_leaves(value, copy);
  for (auto& [name, value] : copies.kwargs) value = map_leaves(value, copy);
  return copies;
}

// Copies of weights on a device, each made when it is first asked for.
class WeightsOnDevice {
 public:
  explicit WeightsOnDevice(at::Device device) : device_(device) {}

  at::Tensor operator()(const at::Tensor& weight) {
    if (device_.is_cpu()) return weight;
    at::Tensor& copy = copies_[weight.unsafeGetTensorImpl()];
    if (!copy.defined()) copy = weight.detach().to(device_).set_requires_grad(weight.requires_grad());
    return copy;
  }

 private:
  at::Device device_;
  std::map<const void*, at::Tensor> copies_;
};

c10::IValue on_cpu(const c10::IValue& value) {
  return map_leaves(value, [](const c10::IValue& leaf) {
    return leaf.isTensor() && leaf.toTensor().defined() ? c10::IValue(leaf.toTensor().cpu()) : leaf;
  });
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
  const std::vector<std::vector<int>> order = gradient_order(schedule);
  // The first stage that has a parameter determines the order of its sum.
  std::map<std::string, int> stage_of;
  for (int stage = pipe.num_stages() - 1; stage >= 0; --stage) {
    for (const auto& [name, tensor] : pipe.state_dict(stage)) stage_of[name] = stage;
  }
  std::vector<at::Tensor> trainable;
  std::vector<std::string> names;
  std::vector<OrderedSum> sums;
  const ProgramState& state = state_of(pipe.program());
  state.weights->load_all();
  WeightsOnDevice weights(options.device);
  for (const auto& [name, parameter] : pipe.program().parameters()) {
    if (!parameter.requires_grad()) continue;
    trainable.push_back(weights(parameter));
    names.push_back(name);
    sums.emplace_back(order[static_cast<std::size_t>(stage_of.at(name))]);
  }
  // The reference saves all activations, so it also tells whether a recomputation is right.
  const auto mode = std::make_shared<Interpreter::Mode>(*state.mode);
  mode->recomputed = nullptr;
  const std::shared_ptr<const Subgraph> whole =
      state.subgraph_on(options.device, mode, [&](const at::Tensor& weight) { return weights(weight); });
  ReferenceRun result;
  for (std::size_t i = 0; i < microbatches.size(); ++i) {
    if (options.is_cancelled()) return result;
    const RandomScope scope(options.seed, options.step, static_cast<std::int64_t>(i), /*place=*/0);
    const Arguments arguments = copied(microbatches[i], options.device);
    const c10::IValue output =
        state.exported->out_spec.unflatten(whole->run(pipe.program().flatten_inputs(arguments.args, arguments.kwargs)));
    const at::Tensor loss = options.loss(output);
    std::vector<at::Tensor> contributions(trainable.size());
    if (loss.requires_grad() && !trainable.empty()) {
      const at::Tensor seed = at::ones_like(loss) / static_cast<double>(microbatches.size());
      contributions = torch::autograd::grad({loss}, trainable, {seed}, /*retain_graph=*/false, /*create_graph=*/false,
                                            /*allow_unused=*/true);
    }
    {
      const at::NoGradGuard no_grad;
      for (std::size_t k = 0; k < sums.size(); ++k) sums[k].add(static_cast<int>(i), std::move(contributions[k]));
    }
    result.outputs.push_back(on_cpu(flatten_args_detach(output).value));
    result.losses.push_back(loss.detach().cpu());
  }
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (const auto largest = sums[i].largest()) result.largest_contributions[names[i]] = *largest;
    if (sums[i].sum().defined()) result.gradients.emplace(names[i], dense(sums[i].sum()).cpu());
  }
  return result;
}

}  // namespace penstock::internal
