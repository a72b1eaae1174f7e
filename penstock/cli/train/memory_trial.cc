#include "penstock/cli/train/memory_trial.h"

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "penstock/schedule/memory.h"
#include "penstock/schedule/passes.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/train/step_batches.h"

namespace penstock::internal::cli {
namespace {

// The first microbatch of each batch. All of them count in the loss, even if they have no target that does.
class FirstMicrobatches final : public Data {
 public:
  FirstMicrobatches(const Data& data, int microbatches) : data_(data), microbatches_(microbatches) {}

  Batch batch(std::int64_t number) const override {
    return split_batch(data_.batch(number), {}, microbatches_, "microbatches").front();
  }
  at::Tensor loss(const c10::IValue& output, const c10::IValue& target) const override {
    return data_.loss(output, target);
  }
  std::int64_t size_of(const Batch& batch) const override { return data_.size_of(batch); }
  std::string unit() const override { return data_.unit(); }
  std::string description() const override { return data_.description(); }

 private:
  const Data& data_;
  int microbatches_;
};

// Builds a model of its own for a trial, with the weights of this process's stages. A collective.
TrainSetup set_up_trial(const TrainOptions& options, const TrainerOptions& trainer_options,
                        const Agreement& agreement) {
  const bool between_processes = trainer_options.transport != nullptr;
  TrainSetup setup;
  agreement.fail_together([&] {
    setup = set_up(options, between_processes ? 1 : options.data_parallel);
    require_splittable(setup, options, between_processes);
    microbatch_shares(*setup.data, setup.data->batch(0), options.data_parallel, setup.schedule->microbatches());
    for (const int stage : local_stages(*setup.schedule, trainer_options.transport.get())) {
      for (const auto& replica : setup.replicas) replica->load_stage(stage);
    }
  });
  return setup;
}

}  // namespace

Trial run_trial(const TrainOptions& options, TrainerOptions trainer_options, const Agreement& agreement) {
  TrainSetup setup = set_up_trial(options, trainer_options, agreement);
  const FirstMicrobatches data(*setup.data, setup.schedule->microbatches());
  // Losses that are not finite are for the run to judge.
  trainer_options.on_nonfinite = OnNonFinite::Skip;
  trainer_options.max_skipped = std::numeric_limits<int>::max();
  Trainer trainer(std::move(setup.replicas), data, keep_microbatches(*setup.schedule, 1), std::move(trainer_options));
  // The second step has the optimizer's state from its beginning.
  for (int step = 0; step < 2; ++step) trainer.step();
  return {.costs = trainer.costs({}), .graph = trainer.pipeline().schedule().graph()};
}

RankNeed max_of(const RankNeed& left, const RankNeed& right) {
  return right.bytes > left.bytes ? right : left;
}

RankNeed need_of(const Schedule& schedule, const Trial& trial) {
  const Schedule lowered = lower(schedule.with_graph(trial.graph));
  RankNeed worst;
  for (int rank = 0; rank < lowered.ranks(); ++rank) {
    worst = max_of(worst, {.bytes = peak_bytes(lowered, trial.costs, rank), .rank = rank});
  }
  return worst;
}

}  // namespace penstock::internal::cli
