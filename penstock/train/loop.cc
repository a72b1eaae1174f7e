#include "penstock/train/loop.h"

#include <utility>

namespace penstock::internal {

int train(Trainer& trainer, std::int64_t steps, const std::vector<Batch>& held_out, const LoopOptions& options,
          const LoopEvents& events) {
  std::int64_t last_saved = trainer.steps_done();
  const auto save = [&] {
    if (options.checkpoint.empty() || last_saved == trainer.steps_done()) return;
    const std::string path = trainer.save(options.checkpoint, options.keep, options.configuration);
    last_saved = trainer.steps_done();
    if (events.saved) events.saved(last_saved, path);
  };
  const auto evaluate = [&] {
    if (held_out.empty()) return;
    const Trainer::Evaluation evaluation = trainer.evaluate(held_out, options.eval_outputs);
    trainer.require_finite(evaluation);
    if (events.evaluated) events.evaluated(trainer.steps_done(), evaluation);
  };
  const auto is_due = [&](std::int64_t every) { return every > 0 && trainer.steps_done() % every == 0; };
  // Reports a batch that cannot be evaluated before the first step rather than after the last.
  if (trainer.steps_done() < steps && !held_out.empty()) trainer.evaluate({held_out.front()}, options.eval_outputs);
  if (events.starting) events.starting();
  bool has_begun = false;
  while (trainer.steps_done() < steps) {
    const StepReport report = trainer.step(events.stop_code ? events.stop_code() : 0);
    if (!std::exchange(has_begun, true) && events.begun) events.begun();
    if (events.stepped) events.stepped(report);
    if (report.stop_code != 0) {
      save();
      return report.stop_code;
    }
    if (is_due(options.checkpoint_every)) save();
    if (is_due(options.eval_every) && trainer.steps_done() < steps) evaluate();
  }
  save();
  evaluate();
  return 0;
}

}  // namespace penstock::internal
