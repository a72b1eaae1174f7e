// Losses and gradients that are NaN or infinite: where they come from, and what a trainer does about them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/schedule/schedule.h"
#include "penstock/train/step_batches.h"
#include "penstock/train/step_statistics.h"

namespace penstock::internal {

// Reaction to a step whose loss or gradient norm is NaN or infinite. In both cases parameters, optimizers and buffers
// are as they were before the step.
enum class OnNonFinite {
  // Trainer::step throws NonFiniteError.
  Stop,
  // The step is counted, and changes nothing.
  Skip,
};

// Thrown when a loss or a gradient is not finite. The message names the step, its batches, the microbatch or the
// parameter, and the stage.
class NonFiniteError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Decides which steps are skipped.
class NonFinitePolicy {
 public:
  NonFinitePolicy(OnNonFinite reaction, int max_skipped) : reaction_(reaction), max_skipped_(max_skipped) {}

  // Throws NonFiniteError, with the problem and the hint, unless the step may be skipped.
  void require_skippable(const std::string& problem, const std::string& hint) const;
  // Throws NonFiniteError if there is a problem with an evaluation, unless such results are skipped.
  void require_finite(const std::string& evaluation_problem) const;
  // Counts a completed step.
  void count(bool skipped) { skipped_in_a_row_ = skipped ? skipped_in_a_row_ + 1 : 0; }

 private:
  OnNonFinite reaction_;
  int max_skipped_;
  int skipped_in_a_row_ = 0;
};

// Returns where a loss that is not finite comes from, as the end of a sentence; empty if it is finite or does not
// count. `index` is that of the microbatch in its batch, `replicas` the number of replicas of the run.
std::string nonfinite_loss_text(const Schedule& schedule, int replicas, const std::string& batch_name,
                                std::size_t index, const MicrobatchShare& share, double loss);

// Returns what is not finite in a step, as a sentence. `names` and `stages` are the names and stages of the model's
// parameters.
std::string nonfinite_step_text(std::int64_t step, const Schedule& schedule, int replicas, const StepBatches& batches,
                                const StepStatistics& statistics, const std::vector<std::string>& names,
                                const std::vector<int>& stages);

}  // namespace penstock::internal
