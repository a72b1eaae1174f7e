#include "penstock/train/optimizer.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>
#include <utility>
#include <vector>

#include "penstock/base/text.h"

namespace penstock::internal {

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.detach().resolve_conj()) : tensor;
}

class Optimizer::Kind {
 public:
  virtual ~Kind() = default;
  virtual void step(double learning_rate) = 0;
  virtual NamedTensors state() const = 0;
  virtual void load(const std::function<std::optional<at::Tensor>(const std::string&)>& find) = 0;
};

// Each optimizer of libtorch has its own types of options and state. Traits convert a state to named tensors and back.
template <class Traits>
class Optimizer::KindOf final : public Kind {
 public:
  KindOf(const OptimizerOptions& options, NamedTensors parameters)
      : parameters_(std::move(parameters)),
        stepped_(all_as_real()),
        optimizer_(trainable(), Traits::options(options)) {}

  void step(double learning_rate) override {
    for (torch::optim::OptimizerParamGroup& group : optimizer_.param_groups()) group.options().set_lr(learning_rate);
    for (std::size_t i = 0; i < stepped_.size(); ++i) {
      if (stepped_[i].is_same(parameters_[i].second)) continue;
      const at::Tensor gradient = std::exchange(parameters_[i].second.mutable_grad(), {});
      if (gradient.defined()) stepped_[i].mutable_grad() = as_real(gradient);
    }
    optimizer_.step();
    for (const at::Tensor& tensor : stepped_) tensor.mutable_grad().reset();
  }

  NamedTensors state() const override {
    NamedTensors named;
    for (std::size_t i = 0; i < stepped_.size(); ++i) {
      const auto& [name, parameter] = parameters_[i];
      const auto found = optimizer_.state().find(stepped_[i].unsafeGetTensorImpl());
      if (found == optimizer_.state().end()) continue;
      const std::size_t first = named.size();
      Traits::save(static_cast<const typename Traits::State&>(*found->second), name + ".", named);
      for (std::size_t k = first; k < named.size(); ++k) {
        at::Tensor& state = named[k].second;
        if (parameter.is_complex() && state.is_floating_point()) state = at::view_as_complex(state);
      }
    }
    return named;
  }

  void load(const std::function<std::optional<at::Tensor>(const std::string&)>& find) override {
    const auto find_real = [&](const std::string& name) {
      std::optional<at::Tensor> found = find(name);
      if (found) found = as_real(*found);
      return found;
    };
    for (std::size_t i = 0; i < stepped_.size(); ++i) {
      auto state = std::make_unique<typename Traits::State>();
      if (!Traits::load(*state, parameters_[i].first + ".", find_real)) continue;
      optimizer_.state().insert_or_assign(stepped_[i].unsafeGetTensorImpl(), std::move(state));
    }
  }

 private:
  std::vector<at::Tensor> all_as_real() const {
    std::vector<at::Tensor> all;
    for (const auto& [name, tensor] : parameters_) all.push_back(as_real(tensor));
    return all;
  }
  std::vector<at::Tensor> trainable() const {
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < stepped_.size(); ++i) {
      if (parameters_[i].second.requires_grad()) all.push_back(stepped_[i]);
    }
    return all;
  }

  NamedTensors parameters_;
  // Tensors that the optimizer steps: the parameters themselves, or real views of complex ones.
  std::vector<at::Tensor> stepped_;
  typename Traits::Optimizer optimizer_;
};

struct Optimizer::Sgd {
  using Optimizer = torch::optim::SGD;
  using State = torch::optim::SGDParamState;

  static torch::optim::SGDOptions options(const OptimizerOptions& options) {
    return torch::optim::SGDOptions(1).momentum(options.momentum).weight_decay(options.weight_decay);
  }
  static void save(const State& state, const std::string& prefix, NamedTensors& tensors) {
    if (state.momentum_buffer().defined()) tensors.emplace_back(prefix + "momentum_buffer", state.momentum_buffer());
  }
  template <class Find>
  static bool load(State& state, const std::string& prefix, const Find& find) {
    const std::optional<at::Tensor> momentum = find(prefix + "momentum_buffer");
    if (momentum) state.momentum_buffer(*momentum);
    return momentum.has_value();
  }
};

namespace {

// Adam and AdamW have the same state.
template <class OptimizerType, class OptionsType, class StateType>
struct AdamTraits {
  using Optimizer = OptimizerType;
  using State = StateType;

  static OptionsType options(const OptimizerOptions& options) {
    return OptionsType(1).betas({options.beta1, options.beta2}).eps(options.epsilon).weight_decay(options.weight_decay);
  }
  static void save(const State& state, const std::string& prefix, NamedTensors& tensors) {
    tensors.emplace_back(prefix + "exp_avg", state.exp_avg());
    tensors.emplace_back(prefix + "exp_avg_sq", state.exp_avg_sq());
    tensors.emplace_back(prefix + "step", at::scalar_tensor(state.step(), at::TensorOptions(at::kLong)));
  }
  template <class Find>
  static bool load(State& state, const std::string& prefix, const Find& find) {
    const std::optional<at::Tensor> average = find(prefix + "exp_avg");
    const std::optional<at::Tensor> square = find(prefix + "exp_avg_sq");
    const std::optional<at::Tensor> step = find(prefix + "step");
    if (!average || !square || !step) return false;
    state.exp_avg(*average);
    state.exp_avg_sq(*square);
    state.step(step->template item<std::int64_t>());
    return true;
  }
};

}  // namespace

struct Optimizer::Adam : AdamTraits<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState> {};
struct Optimizer::AdamW : AdamTraits<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState> {};

Optimizer::Optimizer(const OptimizerOptions& options, NamedTensors parameters) {
  if (options.name == "sgd") {
    kind_ = std::make_unique<KindOf<Sgd>>(options, std::move(parameters));
  } else if (options.name == "adam") {
    kind_ = std::make_unique<KindOf<Adam>>(options, std::move(parameters));
  } else if (options.name == "adamw") {
    kind_ = std::make_unique<KindOf<AdamW>>(options, std::move(parameters));
  } else {
    throw std::invalid_argument(
        concat("there is no optimizer '", options.name, "'.\n  Hint: the optimizers are sgd, adam and adamw."));
  }
}

Optimizer::~Optimizer() = default;
Optimizer::Optimizer(Optimizer&&) noexcept = default;
Optimizer& Optimizer::operator=(Optimizer&&) noexcept = default;

void Optimizer::step(double learning_rate) {
  kind_->step(learning_rate);
}

NamedTensors Optimizer::state() const {
  return kind_->state();
}

void Optimizer::load(const std::function<std::optional<at::Tensor>(const std::string& name)>& find) {
  kind_->load(find);
}

std::int64_t state_bytes(const OptimizerOptions& options, std::int64_t parameter_bytes) {
  if (options.name == "sgd") return options.momentum > 0 ? parameter_bytes : 0;
  constexpr std::int64_t kStep = 8;
  return 2 * parameter_bytes + kStep;
}

double LearningRate::at(std::int64_t step, std::int64_t steps) const {
  if (step < warmup) return rate * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (schedule == "constant") return rate;
  const std::int64_t last = steps - 1;
  const double done =
      last <= warmup ? 0 : std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(last - warmup));
  const double left = schedule == "linear" ? 1 - done : (1 + std::cos(std::numbers::pi * done)) / 2;
  return rate * left + end() * (1 - left);
}

}  // namespace penstock::internal
