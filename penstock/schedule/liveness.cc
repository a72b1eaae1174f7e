#include "penstock/schedule/liveness.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "penstock/schedule/simulate.h"

namespace penstock {
namespace {

using Kind = SavedActivations::Kind;

// Follows the actions of a rank, with what is saved of each stage and microbatch at the moment.
class LivenessWalk {
 public:
  LivenessWalk(const Schedule& schedule, int rank) : schedule_(schedule), actions_(schedule.actions(rank)) {
    for (const Action& action : actions_) {
      for_each_part(action, [&](const Action& part) {
        has_backward_ |= part.is_compute() && !is_forward(part);
        if (part.computation == Computation::Recompute) recomputed_.insert(cell(part));
      });
    }
  }

  std::vector<SavedActivations> run() {
    for (std::size_t i = 0; i < actions_.size(); ++i) {
      ActionPlace place{.action = i};
      for_each_part(actions_[i], [&](const Action& part) {
        if (part.is_compute()) pass(part, place);
        place.second_part = true;
      });
    }
    return std::move(saved_);
  }

 private:
  std::size_t cell(const Action& part) const { return schedule_.cell(part.stage, part.microbatch); }

  void pass(const Action& part, ActionPlace place) {
    if (is_forward(part)) {
      begin(part, recomputed_.contains(cell(part)) ? Kind::Inputs : Kind::Activations, place);
      // Without backwards, nothing is saved for them.
      if (!has_backward_) end(part, place);
      return;
    }
    end(part, place);
    if (part.computation == Computation::Recompute) begin(part, Kind::Activations, place);
    if (part.computation == Computation::InputBackward) begin(part, Kind::WeightInputs, place);
  }

  void begin(const Action& part, Kind kind, ActionPlace place) {
    current_[cell(part)] = saved_.size();
    saved_.push_back({.stage = part.stage, .microbatch = part.microbatch, .kind = kind, .begin = place, .end = place});
  }

  void end(const Action& part, ActionPlace place) { saved_[current_.at(cell(part))].end = place; }

  const Schedule& schedule_;
  std::span<const Action> actions_;
  bool has_backward_ = false;
  std::unordered_set<std::size_t> recomputed_;
  // Index in saved_, by stage and microbatch.
  std::unordered_map<std::size_t, std::size_t> current_;
  std::vector<SavedActivations> saved_;
};

// A change of what is saved: at the start or the end of a computation.
struct Change {
  ActionPlace place;
  bool at_end = false;
  double bytes = 0;
  int activations = 0;
};

// Returns the changes in the order in which they happen: at one moment, what is freed before what is allocated.
std::vector<Change> changes_of(const Schedule& schedule, const Costs& costs, int rank) {
  std::vector<Change> changes;
  for (const SavedActivations& saved : activation_liveness(schedule, rank)) {
    const double bytes = saved_bytes(saved, costs.of_stage(saved.stage));
    const int activations = saved.kind == Kind::Inputs ? 0 : 1;
    changes.push_back({saved.begin, saved.kind == Kind::WeightInputs, bytes, activations});
    changes.push_back({saved.end, saved.kind != Kind::Inputs, -bytes, -activations});
  }
  std::ranges::stable_sort(changes, [](const Change& left, const Change& right) {
    if (left.place != right.place) return left.place < right.place;
    if (left.at_end != right.at_end) return right.at_end;
    return left.activations < right.activations;
  });
  return changes;
}

}  // namespace

std::vector<SavedActivations> activation_liveness(const Schedule& schedule, int rank) {
  return LivenessWalk(schedule, rank).run();
}

double saved_bytes(const SavedActivations& saved, const StageCosts& stage) {
  switch (saved.kind) {
    case Kind::Inputs: return stage.input_bytes;
    case Kind::Activations: return stage.activation_bytes;
    case Kind::WeightInputs: return stage.weight_bytes.value_or(stage.activation_bytes);
  }
  return 0;
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
  for (const Change& change : changes_of(schedule, costs, rank)) {
    now.activations += change.activations;
    now.bytes += change.bytes;
    peak.activations = std::max(peak.activations, now.activations);
    peak.bytes = std::max(peak.bytes, now.bytes);
  }
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
  for (const Change& change : changes_of(schedule, costs, rank)) {
    // On a measured timeline, the estimated spans of a pair's parts may overlap.
    const double time = std::max(steps.back().time, time_of(change));
    const double bytes = steps.back().bytes + change.bytes;
    if (time == steps.back().time) {
      steps.back().bytes = bytes;
    } else {
      steps.push_back({.time = time, .bytes = bytes});
    }
  }
  return steps;
}

}  // namespace penstock
