#include "penstock/runtime/receives.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace penstock::internal {
namespace {

Direction direction_of(const Action& message) {
  return message.carries_activation() ? Direction::Forward : Direction::Backward;
}

}  // namespace

Sends::Sends(const Schedule& schedule, const Record& record)
    : schedule_(schedule),
      sends_(2 * schedule.graph().edges().size() * static_cast<std::size_t>(schedule.microbatches())) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& recorded = record.at(static_cast<std::size_t>(rank));
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      if (!actions[i].is_send()) continue;
      const Edge edge = edge_under(actions[i]);
      sends_[index_of(schedule.graph().edge_index(edge.from, edge.to), direction_of(actions[i]),
                      actions[i].microbatch)] = &recorded[i];
    }
  }
}

const ActionRecord* Sends::of(const Action& receive) const {
  const Edge edge = edge_under(receive);
  return find(schedule_.graph().edge_index(edge.from, edge.to), direction_of(receive), receive.microbatch);
}

std::size_t Sends::index_of(int edge, Direction direction, int microbatch) const {
  const auto row = 2 * static_cast<std::size_t>(edge) + (direction == Direction::Forward ? 0 : 1);
  return row * static_cast<std::size_t>(schedule_.microbatches()) + static_cast<std::size_t>(microbatch);
}

void for_each_receive(const Schedule& schedule, const Record& record,
                      const std::function<void(const ReceivedMessage&)>& visit) {
  const Sends sends(schedule, record);
  const StageGraph& graph = schedule.graph();
  const Placement& placement = schedule.placement();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& recorded = record.at(static_cast<std::size_t>(rank));
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      const Action& action = actions[i];
      // The parts of an OVERLAP_F_B wait at different times, of which the record has only the sum.
      if (action.is_overlap() || !(is_forward(action) || makes_input_gradient(action))) continue;
      const Direction direction = is_forward(action) ? Direction::Forward : Direction::Backward;
      const bool forwards = direction == Direction::Forward;
      std::optional<ReceivedMessage> last;
      for (const int index : forwards ? graph.in_edges(action.stage) : graph.out_edges(action.stage)) {
        const Edge& edge = graph.edges()[static_cast<std::size_t>(index)];
        const int from = placement.rank_of(forwards ? edge.from : edge.to);
        const ActionRecord* const send = from == rank ? nullptr : sends.find(index, direction, action.microbatch);
        if (send == nullptr || (last && last->sent >= send->start)) continue;
        last = {.from = from,
                .to = rank,
                .bytes = send->bytes,
                .sent = send->start,
                .awaited = recorded[i].start,
                .received = recorded[i].start + recorded[i].waited};
      }
      if (last) visit(*last);
    }
  }
}

}  // namespace penstock::internal
