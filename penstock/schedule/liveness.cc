#include "penstock/schedule/liveness.h"

#include <algorithm>
#include <map>
#include <utility>

#include "penstock/schedule/simulate.h"

namespace penstock {
namespace {

using Kind = SavedActivations::Kind;

// A change of what a rank saves, at the start or the end of a computation.
struct Change {
  ActionPlace place;
  bool at_end = false;
  // The computation, whose stage and microbatch it is of.
  Action part;
  Kind kind = Kind::Activations;
  // True if it is saved from here on, false if it has been until now.
  bool begins = false;
};

// Calls visit(change) for each change in the order in which they happen: at one moment, what is freed before what is
// allocated.
template <class Visit>
void for_each_change(const Schedule& schedule, int rank, const Visit& visit) {
  const auto recomputed = recomputed_microbatches(schedule, rank);
  const auto actions = schedule.actions(rank);
  bool has_backward = false;
  for (const Action& action : actions) {
    for_each_part(action, [&](const Action& part) { has_backward |= makes_weight_gradient(part); });
  }
  for (std::size_t i = 0; i < actions.size(); ++i) {
    ActionPlace place{.action = i};
    for_each_part(actions[i], [&](const Action& part) {
      const auto begin = [&](Kind kind, bool at_end) { visit(Change{place, at_end, part, kind, /*begins=*/true}); };
      const auto end = [&](Kind kind, bool at_end) { visit(Change{place, at_end, part, kind, /*begins=*/false}); };
      switch (part.computation) {
        case Computation::Forward:
          begin(recomputed.contains({part.stage, part.microbatch}) ? Kind::Inputs : Kind::Activations, false);
          // Without backwards, nothing is saved for them.
          if (!has_backward) end(Kind::Activations, true);
          break;
        case Computation::Recompute:
          end(Kind::Inputs, false);
          begin(Kind::Activations, false);
          break;
        case Computation::InputBackward:
          end(Kind::Activations, true);
          begin(Kind::WeightInputs, true);
          break;
        case Computation::WeightBackward: end(Kind::WeightInputs, true); break;
        case Computation::FullBackward: end(Kind::Activations, true); break;
        default: break;
      }
      place.second_part = true;
    });
  }
}

double saved_bytes(Kind kind, const StageCosts& stage) {
  switch (kind) {
    case Kind::Inputs: return stage.input_bytes;
    case Kind::Activations: return stage.activation_bytes;
    case Kind::WeightInputs: return stage.weight_bytes.value_or(stage.activation_bytes);
  }
  return 0;
}

// Returns by how many bytes a change makes more or less memory used.
double more_bytes(const Change& change, const Costs& costs) {
  const double bytes = saved_bytes(change.kind, costs.of_stage(change.part.stage));
  return change.begins ? bytes : -bytes;
}

}  // namespace

std::vector<SavedActivations> activation_liveness(const Schedule& schedule, int rank) {
  std::vector<SavedActivations> saved;
  // Index in `saved`, by stage and microbatch.
  std::map<std::pair<int, int>, std::size_t> current;
  for_each_change(schedule, rank, [&](const Change& change) {
    const std::pair cell{change.part.stage, change.part.microbatch};
    if (!change.begins) {
      saved[current.at(cell)].end = change.place;
      return;
    }
    current[cell] = saved.size();
    saved.push_back({.stage = cell.first,
                     .microbatch = cell.second,
                     .kind = change.kind,
                     .begin = change.place,
                     .end = change.place});
  });
  return saved;
}

double static_bytes(const Schedule& schedule, const Costs& costs, int rank) {
  double bytes = costs.of_rank(rank).buffer_bytes;
  for (const int stage : schedule.placement().stages_of(rank)) {
    const StageCosts& stage_costs = costs.of_stage(stage);
    bytes += stage_costs.parameter_bytes + stage_costs.gradient_bytes + stage_costs.optimizer_bytes;
  }
  return bytes;
}

PeakMemory peak_memory(const Schedule& schedule, const Costs& costs, int rank) {
  PeakMemory now{.bytes = static_bytes(schedule, costs, rank)};
  PeakMemory peak = now;
  for_each_change(schedule, rank, [&](const Change& change) {
    if (change.kind != Kind::Inputs) now.activations += change.begins ? 1 : -1;
    now.bytes += more_bytes(change, costs);
    peak.activations = std::max(peak.activations, now.activations);
    peak.bytes = std::max(peak.bytes, now.bytes);
  });
  return peak;
}

std::vector<MemoryStep> memory_over_time(const Schedule& schedule, const Timeline& timeline, const Costs& costs,
                                         int rank) {
  const auto actions = schedule.actions(rank);
  const std::vector<Span>& spans = timeline.ranks[static_cast<std::size_t>(rank)].spans;
  const auto time_of = [&](const Change& change) {
    const Action& action = actions[change.place.action];
    Span span = spans[change.place.action];
    if (action.is_overlap()) {
      const PairSpans parts = split_pair(action, span, costs);
      span = change.place.second_part ? parts.second : parts.first;
    }
    return change.at_end ? span.end : span.start;
  };
  std::vector<MemoryStep> steps = {{.time = 0, .bytes = static_bytes(schedule, costs, rank)}};
  for_each_change(schedule, rank, [&](const Change& change) {
    // On a measured timeline, the estimated spans of a pair's parts may overlap.
    const double time = std::max(steps.back().time, time_of(change));
    const double bytes = steps.back().bytes + more_bytes(change, costs);
    if (time == steps.back().time) {
      steps.back().bytes = bytes;
    } else {
      steps.push_back({.time = time, .bytes = bytes});
    }
  });
  return steps;
}

}  // namespace penstock
