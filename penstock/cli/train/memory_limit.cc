#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/cli/byte_units.h"
#include "penstock/cli/train/memory_limit.h"
#include "penstock/cli/train/numbers.h"
#include "penstock/cli/train/setup.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/liveness.h"
#include "penstock/schedule/passes.h"
#include "penstock/tensor/microbatch.h"

namespace penstock::internal::cli {
namespace {

// The first microbatch of each batch.
class FirstMicrobatches final : public Data {
 public:
  FirstMicrobatches(const Data& data, int microbatches) : data_(data), microbatches_(microbatches) {}

  Batch batch(std::int64_t number) const override {
    return split_batch(data_.batch(number), {}, microbatches_, "microbatches").front();
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    return data_.loss(output, target);
  }
  double loss_weight(const Batch& microbatch) const override { return data_.loss_weight(microbatch); }
  std::int64_t size_of(const Batch& batch) const override { return data_.size_of(batch); }
  std::string unit() const override { return data_.unit(); }
  std::string description() const override { return data_.description(); }

 private:
  const Data& data_;
  int microbatches_;
};

double largest(const Schedule& schedule, const Costs& costs) {
  double bytes = 0;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    bytes = std::max(bytes, peak_bytes(schedule, costs, rank));
  }
  return bytes;
}

std::string size(double bytes) {
  return concat(short_number(bytes), "B");
}

// Collects options under which the run would fit.
class Alternatives {
 public:
  Alternatives(const TrainOptions& options, const Schedule& schedule, Costs costs, double limit)
      : options_(options), schedule_(schedule), costs_(std::move(costs)), limit_(limit) {}

  std::string text() {
    if (options_.run.recomputes("none")) {
      add("--recompute stages", add_recomputation(schedule_), costs_);
    }
    const int per_rank = schedule_.stages() / schedule_.ranks();
    for (const Generator& generator : generators()) {
      if (!options_.run.csv.empty() || generator.name == find_generator(options_.run.schedule).name) continue;
      if (generator.stages_per_rank != 0 && generator.stages_per_rank != per_rank) continue;
      const Schedule other =
          generate(generator.name,
                   {.ranks = schedule_.ranks(), .stages_per_rank = per_rank, .microbatches = schedule_.microbatches()});
      if (features_of(other).backward) add(concat("--schedule ", generator.name), other, costs_);
    }
    for (const int factor : {2, 4}) {
      if (!options_.run.csv.empty()) break;
      const int microbatches = factor * schedule_.microbatches();
      Costs smaller = costs_;
      for (StageCosts& stage : smaller.stages) {
        if (stage.weight_bytes) *stage.weight_bytes /= factor;
        for (double* bytes : {&stage.activation_bytes, &stage.input_bytes, &stage.forward_workspace,
                              &stage.backward_workspace, &stage.message_bytes}) {
          *bytes /= factor;
        }
      }
      add(concat("--microbatches ", microbatches),
          generate(options_.run.schedule,
                   {.ranks = schedule_.ranks(), .stages_per_rank = per_rank, .microbatches = microbatches}),
          smaller);
    }
    if (found_.empty()) return "\n  Hint: cut the model into more stages on more ranks, or make the batches smaller.";
    return "\n  Hint: it would fit with " + join(found_, ", or ") + ".";
  }

 private:
  void add(const std::string& what, const Schedule& schedule, const Costs& costs) {
    const double bytes = largest(lower(schedule), costs);
    if (bytes <= limit_) found_.push_back(concat(what, " (", size(bytes), ")"));
  }

  const TrainOptions& options_;
  const Schedule& schedule_;
  Costs costs_;
  double limit_;
  std::vector<std::string> found_;
};

}  // namespace

void require_memory(const TrainOptions& options, const Schedule& schedule, const TrainerOptions& trainer_options) {
  const double limit = *parse_bytes(options.memory);
  if (features_of(schedule).communication) {
    throw ScheduleError("--memory needs a schedule without messages, which are added when it is lowered.");
  }
  TrainSetup trial = set_up(options, trainer_options.transport == nullptr ? options.data_parallel : 1);
  const FirstMicrobatches data(*trial.data, schedule.microbatches());
  TrainerOptions trial_options = trainer_options;
  trial_options.on_nonfinite = OnNonFinite::Skip;
  Costs costs;
  {
    Trainer trainer(std::move(trial.replicas), data, keep_microbatches(schedule, 1), std::move(trial_options));
    // The second step has the optimizer's state from its beginning.
    for (int step = 0; step < 2; ++step) trainer.step();
    costs = trainer.costs({});
  }
  const Schedule lowered = lower(schedule);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const double bytes = peak_bytes(lowered, costs, rank);
    if (bytes <= limit) continue;
    throw std::runtime_error(concat("rank ", rank, " would need ", size(bytes),
                                    " of memory for its tensors, and --memory ", "allows ", options.memory, ".",
                                    Alternatives(options, schedule, costs, limit).text()));
  }
}

}  // namespace penstock::internal::cli
