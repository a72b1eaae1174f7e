// Optimizers over parameters that have names, so that what they remember can be saved and read by others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "penstock/stage/module.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock::internal {

struct OptimizerOptions {
  // "sgd", "adam" or "adamw".
  std::string name = "adamw";
  // Of sgd.
  double momentum = 0.9;
  // Of adam and adamw.
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
};

// Returns how many bytes an optimizer remembers of a parameter of so many bytes, once it has stepped it.
std::int64_t state_bytes(const OptimizerOptions& options, std::int64_t parameter_bytes);

// A parameter or its gradient as optimizers take it: a complex number is two real ones.
at::Tensor as_real(const at::Tensor& tensor);

// libtorch's optimizers behind one face.
class Optimizer {
 public:
  // Throws std::invalid_argument for a name that there is not.
  Optimizer(const OptimizerOptions& options, NamedTensors parameters);
  ~Optimizer();
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Steps every parameter that has a gradient, and lets go of the gradients.
  void step(double learning_rate);

  // What it remembers of each parameter: "NAME.exp_avg", "NAME.exp_avg_sq", "NAME.step", "NAME.momentum_buffer". The
  // tensors are its own.
  NamedTensors state() const;
  // Takes these up: `find` gives the tensor of a name, or none for what it does not remember yet.
  void load(const std::function<std::optional<at::Tensor>(const std::string& name)>& find);

 private:
  class Kind;
  template <class Traits>
  class KindOf;
  struct Sgd;
  struct Adam;
  struct AdamW;

  std::unique_ptr<Kind> kind_;
};

// Learning rate of each step: it rises from 0 in `warmup` steps, and then stays constant, or falls to `minimum` in a
// line or along a cosine.
struct LearningRate {
  double rate = 4e-3;
  // "constant", "linear" or "cosine".
  std::string schedule = "cosine";
  std::int64_t warmup = 50;
  // See end().
  std::optional<double> minimum = std::nullopt;

  // Returns the rate of the last step, which linear and cosine schedules fall to.
  double end() const { return minimum.value_or(rate / 20); }
  // Returns the rate of a step from 0 to before `steps`.
  double at(std::int64_t step, std::int64_t steps) const;
};

}  // namespace penstock::internal
