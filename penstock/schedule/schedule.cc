#include "penstock/schedule/schedule.h"

#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"

namespace penstock {

using internal::concat;

Schedule::Schedule(const Placement& placement, int microbatches)
    : Schedule(placement, StageGraph(placement.stages()), microbatches) {}

Schedule::Schedule(Placement placement, StageGraph graph, int microbatches)
    : placement_(std::move(placement)),
      graph_(std::move(graph)),
      microbatches_(microbatches),
      lists_(static_cast<std::size_t>(placement_.ranks())) {
  if (graph_.stages() != placement_.stages()) {
    throw ScheduleError(
        concat("a placement of ", placement_.stages(), " stages does not fit a graph of ", graph_.stages(), "."));
  }
  if (microbatches < 1) {
    throw ScheduleError(concat("a schedule needs at least one microbatch, not ", microbatches, "."));
  }
}

std::size_t Schedule::size() const {
  std::size_t total = 0;
  for (const auto& list : lists_) total += list.size();
  return total;
}

Schedule Schedule::without_actions() const {
  Schedule result(placement_, graph_, microbatches_);
  result.source_ = source_;
  return result;
}

Schedule Schedule::with_graph(StageGraph graph) const {
  Schedule result(placement_, std::move(graph), microbatches_);
  result.lists_ = lists_;
  result.source_ = source_;
  return result;
}

Features features_of(const Schedule& schedule) {
  Features features;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions(rank)) {
      switch (action.computation) {
        case Computation::Forward: break;
        case Computation::InputBackward:
        case Computation::WeightBackward:
        case Computation::FullBackward:
        case Computation::Recompute: features.backward = true; break;
        case Computation::Overlap:
          features.backward |= !is_forward(action.first()) || !is_forward(action.second());
          break;
        case Computation::Unshard:
        case Computation::Reshard: features.sharding = true; break;
        case Computation::ReduceGrad: features.reduction = true; break;
        case Computation::SumShared: features.shared_sums = true; break;
        case Computation::SendForward:
        case Computation::RecvForward:
        case Computation::SendBackward:
        case Computation::RecvBackward: features.communication = true; break;
      }
    }
  }
  return features;
}

std::set<std::pair<int, int>> recomputed_microbatches(const Schedule& schedule, int rank) {
  std::set<std::pair<int, int>> recomputed;
  for (const Action& action : schedule.actions(rank)) {
    if (action.computation == Computation::Recompute) recomputed.emplace(action.stage, action.microbatch);
  }
  return recomputed;
}

std::string counted(std::size_t number, const std::string& what) {
  const char* const plural = what.ends_with("ch") ? "es" : "s";
  return concat(number, " ", what, number == 1 ? "" : plural);
}

std::string size_text(const Schedule& schedule) {
  return concat(counted(static_cast<std::size_t>(schedule.ranks()), "rank"), ", ",
                counted(static_cast<std::size_t>(schedule.stages()), "stage"), ", ",
                counted(static_cast<std::size_t>(schedule.microbatches()), "microbatch"));
}

}  // namespace penstock
