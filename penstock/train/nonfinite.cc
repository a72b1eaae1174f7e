#include "penstock/train/nonfinite.h"

#include <algorithm>
#include <cmath>

#include "penstock/base/text.h"

namespace penstock::internal {

void NonFinitePolicy::require_skippable(const std::string& problem, const std::string& hint) const {
  if (reaction_ == OnNonFinite::Stop) throw NonFiniteError(concat(problem, "\n  Hint: ", hint));
  if (skipped_in_a_row_ < max_skipped_) return;
  throw NonFiniteError(concat(problem, "\n  The ", skipped_in_a_row_,
                              " steps before it were skipped too.\n  Hint: allow more skipped steps in a row."));
}

void NonFinitePolicy::require_finite(const std::string& evaluation_problem) const {
  if (evaluation_problem.empty() || reaction_ == OnNonFinite::Skip) return;
  throw NonFiniteError(evaluation_problem + "\n  Hint: look at the data and the weights.");
}

std::string nonfinite_loss_text(const Schedule& schedule, int replicas, const std::string& batch_name,
                                std::size_t index, const MicrobatchShare& share, double loss) {
  if (share.weight == 0 || std::isfinite(loss)) return "";
  const auto microbatches = static_cast<std::size_t>(schedule.microbatches());
  std::string text = batch_name.empty() ? "" : ", " + batch_name;
  text += concat(", microbatch ", index % microbatches);
  if (replicas > 1) text += concat(" of replica ", index / microbatches);
  return text + concat(" (rows ", share.first_row, " to ", share.first_row + share.rows - 1, "), stage ",
                       schedule.stages() - 1, ": the loss is ", std::isnan(loss) ? "NaN." : "infinite.");
}

std::string nonfinite_step_text(std::int64_t step, const Schedule& schedule, int replicas, const StepBatches& batches,
                                const StepStatistics& statistics, const std::vector<std::string>& names,
                                const std::vector<int>& stages) {
  std::string loss_text;
  std::size_t next = 0;
  for (std::size_t batch = 0; batch < batches.batches.size(); ++batch) {
    for (std::size_t i = 0; i < batches.shares[batch].size(); ++i) {
      const double loss = statistics.losses[next++];
      if (!loss_text.empty()) continue;
      loss_text =
          nonfinite_loss_text(schedule, replicas, batches.batches[batch].name, i, batches.shares[batch][i], loss);
    }
  }
  const std::string step_text = concat("step ", step);
  if (!loss_text.empty()) loss_text.insert(0, step_text);
  const std::vector<double>& squares = statistics.gradient_squares;
  const auto bad = std::ranges::find_if(squares, [](double square) { return !std::isfinite(square); });
  if (bad == squares.end()) {
    if (!loss_text.empty()) return loss_text;
    return concat(step_text, batches.names(), ": the norm of all gradients overflows.");
  }
  const auto position = static_cast<std::size_t>(bad - squares.begin());
  if (!loss_text.empty()) {
    return concat(loss_text, "\n  The first parameter whose gradient is not finite is ", names[position], " of stage ",
                  stages[position], ".");
  }
  return concat(step_text, batches.names(), ", stage ", stages[position], ": the gradient of ", names[position],
                " is not finite; the losses are.");
}

}  // namespace penstock::internal
