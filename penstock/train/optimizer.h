// Optimizers over named parameters, whose state can be saved and loaded under these names.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "penstock/tensor/named_tensors.h"

namespace penstock::internal {

struct OptimizerOptions {
  // "sgd", "adam" or "adamw".
  std::string name = "adamw";
  // Used by sgd.
  double momentum = 0.9;
  // Used by adam and adamw.
  double beta1 = 0.9;
  double beta2 = 0.98;
  double epsilon = 1e-8;
  // Used by all of them; adamw decouples it from the gradient.
  double weight_decay = 0.01;
};

// Returns the number of bytes of state that an optimizer has for a parameter of that size after its first step.
std::int64_t state_bytes(const OptimizerOptions& options, std::int64_t parameter_bytes);

// Returns a parameter or gradient in the form that optimizers step: a complex tensor as a view of pairs of real
// numbers.
at::Tensor as_real(const at::Tensor& tensor);

// Common interface of libtorch's optimizers. The parameters are shared with the caller.
class Optimizer {
 public:
  // Throws std::invalid_argument for an unknown optimizer.
  Optimizer(const OptimizerOptions& options, NamedTensors parameters);
  ~Optimizer();
  Optimizer(Optimizer&&) noexcept;
  Optimizer& operator=(Optimizer&&) noexcept;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Steps every parameter that has a gradient, and resets the gradients.
  void step(double learning_rate);

  // Returns the state of each parameter: "NAME.exp_avg", "NAME.exp_avg_sq", "NAME.step", "NAME.momentum_buffer". The
  // tensors are not copied.
  NamedTensors state() const;
  // Replaces the state. `find` returns the tensor of a name, which is not copied, or none if there is no such state.
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

// Learning-rate schedule. The rate rises linearly from 0 in `warmup` steps. Then it stays constant, or falls to
// `minimum` linearly or along a cosine.
struct LearningRate {
  // Rate after the warmup.
  double rate = 4e-3;
  // "constant", "linear" or "cosine".
  std::string schedule = "cosine";
  std::int64_t warmup = 50;
  // Rate of the last step; a twentieth of `rate` if not given.
  std::optional<double> minimum = std::nullopt;

  // Returns the rate that linear and cosine schedules fall to.
  double end() const { return minimum.value_or(rate / 20); }
  // Returns the rate of a step in [0, steps).
  double at(std::int64_t step, std::int64_t steps) const;
};

}  // namespace penstock::internal
