#include "penstock/train/grad_scaler.h"

#include <cmath>
#include <stdexcept>

namespace penstock::internal {
namespace {

bool is_valid_scale(double scale) {
  return std::isfinite(static_cast<float>(scale)) && static_cast<float>(scale) > 0;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options), scale_(static_cast<float>(options.initial_scale)) {
  if (!is_valid_scale(options.initial_scale)) throw std::invalid_argument("the initial loss scale should be positive.");
  if (!(options.growth_factor > 1))
    throw std::invalid_argument("the growth factor of the loss scale should be above 1.");
  if (!(options.backoff_factor > 0 && options.backoff_factor < 1)) {
    throw std::invalid_argument("the backoff factor of the loss scale should be between 0 and 1.");
  }
  if (options.growth_interval < 1) throw std::invalid_argument("the growth interval should be at least 1 step.");
}

double GradScaler::unscale() const {
  return static_cast<float>(1 / static_cast<double>(scale_));
}

void GradScaler::update(bool found_inf) {
  if (found_inf) {
    scale_ = static_cast<float>(scale_ * options_.backoff_factor);
    growth_tracker_ = 0;
    return;
  }
  if (++growth_tracker_ < options_.growth_interval) return;
  // A scale that would be infinite stays as it is.
  const auto grown = static_cast<float>(scale_ * options_.growth_factor);
  if (std::isfinite(grown)) scale_ = grown;
  growth_tracker_ = 0;
}

void GradScaler::load(const State& state) {
  if (!is_valid_scale(state.scale) || state.growth_tracker < 0) {
    throw std::invalid_argument("the state of the gradient scaler is not valid.");
  }
  scale_ = static_cast<float>(state.scale);
  growth_tracker_ = state.growth_tracker;
}

}  // namespace penstock::internal
