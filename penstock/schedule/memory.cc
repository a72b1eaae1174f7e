#include "penstock/schedule/memory.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <set>
#include <span>

#include "penstock/schedule/liveness.h"
#include "penstock/schedule/simulate.h"

namespace penstock {
namespace {

using internal::has_weight_gradients;
using Kind = SavedActivations::Kind;

double saved_bytes(Kind kind, const StageCosts& stage) {
  switch (kind) {
    case Kind::Inputs: return stage.input_bytes;
    case Kind::Activations: return stage.activation_bytes;
    case Kind::WeightInputs: return stage.weight_bytes.value_or(stage.activation_bytes);
  }
  return 0;
}

// True for the last computation of a stage and microbatch: nothing is saved for them afterwards.
bool ends_saving(const Action& part, bool has_backward) {
  return has_backward ? makes_weight_gradient(part) : is_forward(part);
}

double bytes_across(const Schedule& schedule, const Costs& costs, std::span<const int> edges) {
  const Placement& placement = schedule.placement();
  double bytes = 0;
  for (const int edge : edges) {
    const Edge& ends = schedule.graph().edges()[static_cast<std::size_t>(edge)];
    if (placement.rank_of(ends.from) != placement.rank_of(ends.to)) bytes += costs.of_stage(ends.from).message_bytes;
  }
  return bytes;
}

// Returns the peak of received messages: an activation is in memory from its RECV_F to its weight gradient, or to its
// forward if there are no backwards; a gradient from its RECV_B to its backward. In a schedule without messages, they
// are received when they are needed.
double receive_buffers(const Schedule& schedule, const Costs& costs, int rank) {
  const auto has_messages = [](const StageCosts& stage) { return stage.message_bytes > 0; };
  if (!has_messages(costs.stage) && std::ranges::none_of(costs.stages, has_messages)) return 0;
  const auto actions = schedule.actions(rank);
  const bool is_lowered = std::ranges::any_of(actions, &Action::is_message);
  const bool has_backward = has_weight_gradients(schedule, rank);
  const StageGraph& graph = schedule.graph();
  double received = 0;
  double peak = 0;
  for (const Action& action : actions) {
    for_each_part(action, [&](const Action& part) {
      const auto across = [&](std::span<const int> edges) { return bytes_across(schedule, costs, edges); };
      if (part.is_recv()) received += costs.of_stage(edge_under(part).from).message_bytes;
      if (!is_lowered && is_forward(part)) received += across(graph.in_edges(part.stage));
      if (!is_lowered && makes_input_gradient(part)) received += across(graph.out_edges(part.stage));
      peak = std::max(peak, received);
      if (makes_input_gradient(part)) received -= across(graph.out_edges(part.stage));
      if (ends_saving(part, has_backward)) received -= across(graph.in_edges(part.stage));
    });
  }
  return peak;
}

// Walks the actions of a rank and tracks how much memory it needs.
class MemoryWalk {
 public:
  MemoryWalk(const Schedule& schedule, const Costs& costs, int rank)
      : schedule_(schedule),
        costs_(costs),
        rank_(rank),
        has_backward_(has_weight_gradients(schedule, rank)),
        changes_(schedule.actions(rank).size()) {
    for (const SavedActivations& saved : activation_liveness(schedule, rank)) {
      const double bytes = saved_bytes(saved.kind, costs.of_stage(saved.stage));
      const bool at_end = saved.kind == Kind::WeightInputs;
      (at_end ? change_at(saved.begin).at_end : change_at(saved.begin).at_start) += bytes;
      // Inputs are freed when their forward is recomputed, and all else at the end of a backward.
      (saved.kind == Kind::Inputs ? change_at(saved.end).at_start : change_at(saved.end).at_end) -= bytes;
    }
    alive_ = static_bytes(schedule, costs, rank);
    for (const int stage : schedule.placement().stages_of(rank)) alive_ += costs.of_stage(stage).accumulated_bytes;
  }

  // Calls visit(place, at_end, bytes) with the memory during each computation and operation on parameters, and after
  // it.
  template <class Visit>
  void run(const Visit& visit) {
    const auto actions = schedule_.actions(rank_);
    for (std::size_t i = 0; i < actions.size(); ++i) {
      ActionPlace place{.action = i};
      for_each_part(actions[i], [&](const Action& part) {
        const StageCosts& stage = costs_.of_stage(part.stage);
        alive_ += change_at(place).at_start;
        const double temporary = begin(part, stage);
        if (!part.is_message()) visit(place, /*at_end=*/false, alive_ + temporary + sent_in_memory());
        end(part, stage);
        alive_ += change_at(place).at_end;
        if (!part.is_message()) visit(place, /*at_end=*/true, alive_ + sent_in_memory());
        place.second_part = true;
      });
    }
  }

 private:
  // Difference that a computation makes to the saved bytes.
  struct Change {
    double at_start = 0;
    double at_end = 0;
  };

  Change& change_at(const ActionPlace& place) { return changes_[place.action][place.second_part ? 1 : 0]; }

  // Allocates what an action needs, and returns the size of its temporary memory.
  double begin(const Action& part, const StageCosts& stage) {
    switch (part.computation) {
      // The shards are first gathered into a flat buffer.
      case Computation::Unshard: return 2 * stage.unsharded_bytes;
      case Computation::ReduceGrad: return with_gradients_.contains(part.stage) ? stage.unsharded_bytes : 0;
      case Computation::Forward:
      case Computation::Recompute: return stage.forward_workspace;
      case Computation::InputBackward: return stage.backward_workspace;
      case Computation::WeightBackward:
      case Computation::FullBackward:
        if (with_gradients_.insert(part.stage).second) {
          alive_ += stage.unsharded_bytes > 0 ? stage.unsharded_bytes : stage.gradient_bytes;
        }
        return stage.backward_workspace;
      default: return 0;
    }
  }

  // Frees what is not needed after an action.
  void end(const Action& part, const StageCosts& stage) {
    if (part.computation == Computation::Unshard) alive_ += stage.unsharded_bytes;
    if (part.computation == Computation::Reshard) alive_ -= stage.unsharded_bytes;
    if (part.computation == Computation::ReduceGrad && stage.unsharded_bytes > 0) {
      if (with_gradients_.erase(part.stage) > 0) alive_ += stage.gradient_bytes;
    }
    if (part.computation == Computation::SendBackward) {
      sent_ += costs_.of_stage(edge_under(part).from).message_bytes;
    }
    // Until then, the output counts among the saved activations.
    if (ends_saving(part, has_backward_))
      sent_ += bytes_across(schedule_, costs_, schedule_.graph().out_edges(part.stage));
  }

  double sent_in_memory() const {
    const double limit = costs_.of_rank(rank_).sent_bytes;
    return limit > 0 ? std::min(sent_, limit) : sent_;
  }

  const Schedule& schedule_;
  const Costs& costs_;
  int rank_;
  bool has_backward_;
  // Indexed by action and part.
  std::vector<std::array<Change, 2>> changes_;
  double alive_ = 0;
  double sent_ = 0;
  // Stages whose gradients are allocated; with shards, the full gradients.
  std::set<int> with_gradients_;
};

}  // namespace

double static_bytes(const Schedule& schedule, const Costs& costs, int rank) {
  double bytes = costs.of_rank(rank).buffer_bytes + receive_buffers(schedule, costs, rank);
  for (const int stage : schedule.placement().stages_of(rank)) {
    bytes += costs.of_stage(stage).parameter_bytes + costs.of_stage(stage).optimizer_bytes;
  }
  return bytes;
}

double peak_bytes(const Schedule& schedule, const Costs& costs, int rank) {
  const double resident = static_bytes(schedule, costs, rank);
  double gradients = 0;
  double workspace = 0;
  if (has_weight_gradients(schedule, rank)) {
    for (const int stage : schedule.placement().stages_of(rank)) {
      gradients += costs.of_stage(stage).gradient_bytes;
      workspace = std::max(workspace, costs.of_stage(stage).update_workspace);
    }
  }
  double peak = resident + gradients + workspace;
  MemoryWalk(schedule, costs, rank).run([&](const ActionPlace&, bool, double bytes) { peak = std::max(peak, bytes); });
  return peak;
}

std::vector<MemoryStep> memory_over_time(const Schedule& schedule, const Timeline& timeline, const Costs& costs,
                                         int rank) {
  const auto actions = schedule.actions(rank);
  const std::vector<Span>& spans = timeline.ranks[static_cast<std::size_t>(rank)].spans;
  std::vector<MemoryStep> steps = {{.time = 0, .bytes = static_bytes(schedule, costs, rank)}};
  MemoryWalk(schedule, costs, rank).run([&](const ActionPlace& place, bool at_end, double bytes) {
    const Action& action = actions[place.action];
    Span span = spans[place.action];
    if (action.is_overlap()) {
      const PairSpans parts = split_pair(action, span, costs);
      span = place.second_part ? parts.second : parts.first;
    }
    // On a measured timeline, the estimated spans of a pair's parts may overlap.
    const double time = std::max(steps.back().time, at_end ? span.end : span.start);
    // At one moment, what one action frees and the next one allocates are one step.
    if (time == steps.back().time) steps.pop_back();
    if (steps.empty() || bytes != steps.back().bytes) steps.push_back({.time = time, .bytes = bytes});
  });
  return steps;
}

}  // namespace penstock
