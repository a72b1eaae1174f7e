// Dynamic loss scaling for float16, by the rules of torch.amp.GradScaler. Gradients below 6e-8 are zero in float16, so
// the backward begins with a multiple of the loss. When a gradient overflows, the step is skipped and the factor falls;
// after a number of steps without an overflow it grows.
//
//   GradScaler scaler;
//   …                                     // the backward of scaler.scale() times the loss
//   gradient.mul_(scaler.unscale());
//   if (!found_inf) optimizer.step();
//   scaler.update(found_inf);
#pragma once

#include <cstdint>

namespace penstock::internal {

struct GradScalerOptions {
  double initial_scale = 65536;
  // Factor of the scale after `growth_interval` steps in a row without an overflow.
  double growth_factor = 2;
  // Factor of the scale after an overflow.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
};

class GradScaler {
 public:
  // The part of the scaler that changes, which checkpoints contain.
  struct State {
    double scale = 0;
    // Number of steps without an overflow since the scale has changed.
    std::int64_t growth_tracker = 0;
    friend bool operator==(const State&, const State&) = default;
  };

  // Throws std::invalid_argument unless the scale is positive, growth_factor above 1, backoff_factor in (0, 1) and
  // growth_interval positive.
  explicit GradScaler(const GradScalerOptions& options = {});

  // Returns the factor of the loss, a number of float32.
  double scale() const { return scale_; }
  // Returns the factor of gradients that undoes it, 1 / scale() in float32.
  double unscale() const;
  // Ends a step. `found_inf` tells whether a gradient was infinite or NaN; all ranks pass the same.
  void update(bool found_inf);

  State state() const { return {.scale = scale_, .growth_tracker = growth_tracker_}; }
  // Throws std::invalid_argument for a scale that is not positive and finite.
  void load(const State& state);

 private:
  GradScalerOptions options_;
  float scale_;
  std::int64_t growth_tracker_ = 0;
};

}  // namespace penstock::internal
