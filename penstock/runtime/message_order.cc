#include "penstock/runtime/message_order.h"

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/runtime/error.h"
#include "penstock/schedule/graph.h"

namespace penstock::internal {
namespace {

struct SentMessage {
  Tag tag;
  // Ranks of the replica.
  int from = 0;
  int to = 0;
  int from_stage = 0;
  int to_stage = 0;
};

SentMessage place_of(const Schedule& schedule, const Action& message) {
  const Edge edge = edge_under(message);
  const Direction direction = message.carries_activation() ? Direction::Forward : Direction::Backward;
  const bool forwards = direction == Direction::Forward;
  SentMessage place{
      .tag = tag_of(direction, schedule.graph().edge_index(edge.from, edge.to), message.microbatch),
      .from_stage = forwards ? edge.from : edge.to,
      .to_stage = forwards ? edge.to : edge.from,
  };
  place.from = schedule.placement().rank_of(place.from_stage);
  place.to = schedule.placement().rank_of(place.to_stage);
  return place;
}

}  // namespace

Tag tag_of(Direction direction, int edge, int microbatch) {
  return {.channel = static_cast<std::uint32_t>(edge) * 2 + (direction == Direction::Forward ? 0 : 1),
          .number = static_cast<std::uint32_t>(microbatch)};
}

int position_of(const Schedule& schedule, int rank, Tag tag, bool is_receive) {
  const Edge& edge = schedule.graph().edges()[tag.channel / 2];
  const auto takes = [&](const Action& part) {
    if (!part.is_compute() || part.microbatch != static_cast<int>(tag.number)) return false;
    if (tag.channel % 2 == 0) return part.stage == edge.to && is_forward(part);
    return part.stage == edge.from && makes_input_gradient(part);
  };
  const auto sends = [&](const Action& part) { return part.is_send() && place_of(schedule, part).tag == tag; };
  const std::span<const Action> actions = schedule.actions(rank);
  for (std::size_t i = 0; i < actions.size(); ++i) {
    bool found = false;
    for_each_part(actions[i], [&](const Action& part) { found = found || (is_receive ? takes(part) : sends(part)); });
    if (found) return static_cast<int>(i);
  }
  return -1;
}

MessageOrder message_order(const Schedule& schedule, int first_rank, int rank, const StageDeviceTable& devices) {
  MessageOrder order;
  const int own = rank - first_rank;
  const auto device_of = [&](int rank_in_replica, int stage) {
    return devices.at(static_cast<std::size_t>(first_rank + rank_in_replica)).at(static_cast<std::size_t>(stage));
  };
  // Number of receives of each message, less its sends.
  std::map<std::pair<std::uint32_t, std::uint32_t>, int> receives;
  for (int other = 0; other < schedule.ranks(); ++other) {
    for (const Action& action : schedule.actions(other)) {
      for_each_part(action, [&](const Action& part) {
        if (!part.is_message()) return;
        const SentMessage place = place_of(schedule, part);
        if (part.is_recv()) {
          if (other == own) ++receives[{place.tag.channel, place.tag.number}];
          return;
        }
        const MessageOrder::Entry entry{.tag = place.tag,
                                        .from = device_of(place.from, place.from_stage),
                                        .to = device_of(place.to, place.to_stage)};
        if (place.from == own) order.sent[first_rank + place.to].push_back(entry);
        if (place.to != own) return;
        order.received[first_rank + place.from].push_back(entry);
        --receives[{place.tag.channel, place.tag.number}];
      });
    }
  }
  for (const auto& [message, difference] : receives) {
    if (difference == 0) continue;
    const Edge& edge = schedule.graph().edges()[message.first / 2];
    throw PipelineError(concat("rank ", rank, " has ",
                               difference > 0 ? "more receives than sends" : "fewer receives than sends",
                               message.first % 2 == 0 ? " of the activation" : " of the gradient", " of microbatch ",
                               message.second, " between the stages ", edge.from, " and ", edge.to,
                               ".\n  Hint: the schedule should send and receive each message once."));
  }
  return order;
}

}  // namespace penstock::internal
