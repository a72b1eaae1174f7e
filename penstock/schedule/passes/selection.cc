// Passes that remove actions.
#include <utility>
#include <vector>

#include "penstock/schedule/passes.h"

namespace penstock {
namespace {

// Copies the actions for which `wanted` is true. A pair is copied as a whole, or only the part that is wanted.
template <class Wanted>
void copy_if(Schedule& target, const Schedule& source, const Wanted& wanted) {
  for (int rank = 0; rank < source.ranks(); ++rank) {
    for (const Action& action : source.actions(rank)) {
      if (!action.is_overlap()) {
        if (wanted(action)) target.add(rank, action);
        continue;
      }
      const bool first = wanted(action.first());
      const bool second = wanted(action.second());
      if (first && second) {
        target.add(rank, action);
      } else if (first || second) {
        target.add(rank, first ? action.first() : action.second());
      }
    }
  }
}

bool belongs_to_backward(const Action& part) {
  switch (part.computation) {
    case Computation::InputBackward:
    case Computation::WeightBackward:
    case Computation::FullBackward:
    case Computation::Recompute:
    case Computation::SendBackward:
    case Computation::RecvBackward:
    case Computation::ReduceGrad:
    case Computation::SumShared: return true;
    default: return false;
  }
}

constexpr auto kNowhere = static_cast<std::size_t>(-1);

// Returns the actions without each UNSHARD and RESHARD that have no computation of their stage between them.
// `unshard_at` is scratch memory with an entry for each stage; those of this rank are kNowhere. All ranks use the same,
// as a stage is on one rank only.
std::vector<Action> without_unused_shards(std::span<const Action> actions, std::vector<std::size_t>& unshard_at) {
  std::vector<char> dropped(actions.size(), 0);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    const Action& action = actions[i];
    if (action.is_compute()) {
      for_each_part(action, [&](const Action& part) { unshard_at[static_cast<std::size_t>(part.stage)] = kNowhere; });
    } else if (action.computation == Computation::Unshard) {
      unshard_at[static_cast<std::size_t>(action.stage)] = i;
    } else if (action.computation == Computation::Reshard) {
      const std::size_t at = std::exchange(unshard_at[static_cast<std::size_t>(action.stage)], kNowhere);
      if (at != kNowhere) dropped[at] = dropped[i] = 1;
    }
  }
  std::vector<Action> result;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    if (!dropped[i]) result.push_back(actions[i]);
  }
  return result;
}

}  // namespace

Schedule drop_backwards(const Schedule& schedule) {
  Schedule result = schedule.without_actions();
  copy_if(result, schedule, [](const Action& part) { return !belongs_to_backward(part); });
  std::vector<std::size_t> unshard_at(static_cast<std::size_t>(result.stages()), kNowhere);
  for (int rank = 0; rank < result.ranks(); ++rank) {
    result.assign(rank, without_unused_shards(result.actions(rank), unshard_at));
  }
  return result;
}

Schedule drop_reductions(const Schedule& schedule) {
  Schedule result = schedule.without_actions();
  copy_if(result, schedule, [](const Action& part) {
    return part.computation != Computation::ReduceGrad && part.computation != Computation::SumShared;
  });
  return result;
}

Schedule keep_microbatches(Schedule schedule, int microbatches) {
  if (microbatches >= schedule.microbatches()) return schedule;
  Schedule result(schedule.placement(), schedule.graph(), microbatches);
  copy_if(result, schedule, [&](const Action& part) { return part.microbatch < microbatches; });
  return result;
}

Schedule keep_stages(Schedule schedule, int stages) {
  if (stages >= schedule.stages()) return schedule;
  const auto ranks = schedule.placement().ranks_by_stage().first(static_cast<std::size_t>(stages));
  StageGraph graph(stages);
  for (const Edge& edge : schedule.graph().edges()) {
    if (edge.to < stages) graph.add_edge(edge.from, edge.to);
  }
  for (std::vector<int> group : schedule.graph().groups()) {
    std::erase_if(group, [&](int stage) { return stage >= stages; });
    if (group.size() > 1) graph.share(std::move(group));
  }
  Schedule result(Placement({ranks.begin(), ranks.end()}, schedule.ranks()), std::move(graph), schedule.microbatches());
  copy_if(result, schedule, [&](const Action& part) { return part.stage < stages; });
  return result;
}

}  // namespace penstock
