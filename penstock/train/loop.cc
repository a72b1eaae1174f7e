#include "penstock/train/loop.h"

#include <optional>
#include <utility>

#include "penstock/train/nonfinite.h"

namespace penstock::internal {
namespace {

class Loop {
 public:
  Loop(Trainer& trainer, const std::vector<Batch>& held_out, const LoopOptions& options, const LoopEvents& events)
      : trainer_(trainer), held_out_(held_out), options_(options), events_(events), last_saved_(trainer.steps_done()) {}

  int run(std::int64_t steps) {
    try {
      return train(steps);
    } catch (const NonFiniteError&) {
      // All processes throw it, so that they can still complete the checkpoint in flight. Its error is the earlier one.
      announce(trainer_.finish_save());
      throw;
    } catch (...) {
      announce(trainer_.finish_save_after_failure());
      throw;
    }
  }

 private:
  int train(std::int64_t steps) {
    // Reports a batch that cannot be evaluated before the first step rather than after the last.
    if (trainer_.steps_done() < steps && !held_out_.empty()) {
      trainer_.evaluate({held_out_.front()}, options_.eval_outputs);
    }
    if (events_.starting) events_.starting();
    bool has_begun = false;
    while (trainer_.steps_done() < steps) {
      const StepReport report = trainer_.step(events_.stop_code ? events_.stop_code() : 0);
      if (!std::exchange(has_begun, true) && events_.begun) events_.begun();
      if (events_.stepped) events_.stepped(report);
      announce(trainer_.poll_save());
      if (report.stop_code != 0) {
        start_save();
        announce(trainer_.finish_save());
        return report.stop_code;
      }
      if (is_due(options_.checkpoint_every)) start_save();
      if (is_due(options_.eval_every) && trainer_.steps_done() < steps) evaluate();
    }
    start_save();
    announce(trainer_.finish_save());
    evaluate();
    return 0;
  }

  bool is_due(std::int64_t every) const { return every > 0 && trainer_.steps_done() % every == 0; }

  // Begins a checkpoint of this step, unless there is one, after the checkpoint in flight has been completed.
  void start_save() {
    if (options_.checkpoint.empty() || last_saved_ == trainer_.steps_done()) return;
    announce(trainer_.finish_save());
    trainer_.start_save(options_.checkpoint, options_.keep, options_.configuration);
    last_saved_ = trainer_.steps_done();
    if (!trainer_.saves_beside_steps()) announce(trainer_.finish_save());
  }

  void announce(const std::optional<SavedCheckpoint>& saved) const {
    if (saved && events_.saved) events_.saved(saved->step, saved->path);
  }

  void evaluate() const {
    if (held_out_.empty()) return;
    const Trainer::Evaluation evaluation = trainer_.evaluate(held_out_, options_.eval_outputs);
    trainer_.require_finite(evaluation);
    if (events_.evaluated) events_.evaluated(trainer_.steps_done(), evaluation);
  }

  Trainer& trainer_;
  const std::vector<Batch>& held_out_;
  const LoopOptions& options_;
  const LoopEvents& events_;
  std::int64_t last_saved_;
};

}  // namespace

int train(Trainer& trainer, std::int64_t steps, const std::vector<Batch>& held_out, const LoopOptions& options,
          const LoopEvents& events) {
  return Loop(trainer, held_out, options, events).run(steps);
}

}  // namespace penstock::internal
