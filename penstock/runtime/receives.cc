#include "penstock/runtime/receives.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace penstock::internal {
namespace {

// The sends of a record, by way, edge and microbatch.
class Sends {
 public:
  Sends(const Schedule& schedule, const Record& record)
      : schedule_(schedule),
        sends_(2 * schedule.graph().edges().size() * static_cast<std::size_t>(schedule.microbatches())) {
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      const auto actions = schedule.actions(rank);
      const std::vector<ActionRecord>& own = record.at(static_cast<std::size_t>(rank));
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (!actions[i].is_send()) continue;
        const Edge along = edge_under(actions[i]);
        at(schedule.graph().edge_index(along.from, along.to), actions[i].carries_activation(), actions[i].microbatch) =
            &own[i];
      }
    }
  }

  const ActionRecord*& at(int edge, bool forwards, int microbatch) {
    const auto row = 2 * static_cast<std::size_t>(edge) + (forwards ? 0 : 1);
    return sends_[row * static_cast<std::size_t>(schedule_.microbatches()) + static_cast<std::size_t>(microbatch)];
  }

 private:
  const Schedule& schedule_;
  std::vector<const ActionRecord*> sends_;
};

}  // namespace

void for_each_receive(const Schedule& schedule, const Record& record,
                      const std::function<void(const Received&)>& visit) {
  Sends sends(schedule, record);
  const StageGraph& graph = schedule.graph();
  const Placement& placement = schedule.placement();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& own = record.at(static_cast<std::size_t>(rank));
    for (std::size_t i = 0; i < own.size(); ++i) {
      const Action& action = actions[i];
      // The parts of a pair wait at times of their own.
      if (action.is_overlap() || !(is_forward(action) || makes_input_gradient(action))) continue;
      const bool forwards = is_forward(action);
      std::optional<Received> last;
      for (const int e : forwards ? graph.in_edges(action.stage) : graph.out_edges(action.stage)) {
        const Edge& edge = graph.edges()[static_cast<std::size_t>(e)];
        const int from = placement.rank_of(forwards ? edge.from : edge.to);
        const ActionRecord* const send = from == rank ? nullptr : sends.at(e, forwards, action.microbatch);
        if (send == nullptr || (last && last->sent >= send->start)) continue;
        last = {.from = from,
                .to = rank,
                .bytes = send->bytes,
                .sent = send->start,
                .asked = own[i].start,
                .taken = own[i].start + own[i].waited};
      }
      if (last) visit(*last);
    }
  }
}

}  // namespace penstock::internal
