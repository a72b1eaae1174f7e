#include "penstock/schedule/liveness.h"

#include <algorithm>
#include <cstddef>

namespace penstock {

bool internal::has_weight_gradients(const Schedule& schedule, int rank) {
  bool has_any = false;
  for (const Action& action : schedule.actions(rank)) {
    for_each_part(action, [&](const Action& part) { has_any |= makes_weight_gradient(part); });
  }
  return has_any;
}

std::vector<SavedActivations> activation_liveness(const Schedule& schedule, int rank) {
  using Kind = SavedActivations::Kind;
  const auto recomputed = recomputed_microbatches(schedule, rank);
  const auto actions = schedule.actions(rank);
  const bool has_backward = internal::has_weight_gradients(schedule, rank);
  std::vector<SavedActivations> saved;
  const auto microbatches = static_cast<std::size_t>(schedule.microbatches());
  // First index of a stage of this rank in `current`.
  std::vector<std::size_t> begin_of(static_cast<std::size_t>(schedule.stages()));
  std::size_t cells = 0;
  for (const int stage : schedule.placement().stages_of(rank)) {
    begin_of[static_cast<std::size_t>(stage)] = cells;
    cells += microbatches;
  }
  // Index in `saved` of what a stage has saved last of a microbatch.
  std::vector<std::size_t> current(cells);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    ActionPlace place{.action = i};
    for_each_part(actions[i], [&](const Action& part) {
      if (!part.is_compute()) return;
      std::size_t& last =
          current[begin_of[static_cast<std::size_t>(part.stage)] + static_cast<std::size_t>(part.microbatch)];
      const auto begin = [&](Kind kind) {
        last = saved.size();
        saved.push_back(
            {.stage = part.stage, .microbatch = part.microbatch, .kind = kind, .begin = place, .end = place});
      };
      const auto end = [&] { saved[last].end = place; };
      switch (part.computation) {
        // Without backwards, nothing is saved for them, and a forward ends what it begins.
        case Computation::Forward:
          begin(has_backward && recomputed.contains({part.stage, part.microbatch}) ? Kind::Inputs : Kind::Activations);
          break;
        case Computation::Recompute:
          end();
          begin(Kind::Activations);
          break;
        case Computation::InputBackward:
          end();
          begin(Kind::WeightInputs);
          break;
        case Computation::WeightBackward:
        case Computation::FullBackward: end(); break;
        default: break;
      }
      place.second_part = true;
    });
  }
  return saved;
}

int peak_activations(const Schedule& schedule, int rank) {
  const auto recomputed = recomputed_microbatches(schedule, rank);
  const bool has_backward = internal::has_weight_gradients(schedule, rank);
  int saved = 0;
  int peak = 0;
  for (const Action& action : schedule.actions(rank)) {
    for_each_part(action, [&](const Action& part) {
      const bool saves_inputs = has_backward && recomputed.contains({part.stage, part.microbatch});
      if (is_forward(part) ? !saves_inputs : part.computation == Computation::Recompute) ++saved;
      peak = std::max(peak, saved);
      if (has_backward ? makes_weight_gradient(part) : is_forward(part)) --saved;
    });
  }
  return peak;
}

}  // namespace penstock
