// Inserts sends and receives.
//
// A send directly follows the computation of what it sends. To place the receives, all ranks are walked once in
// lock-step: in each round, every rank takes its next action if the inputs are available. The walk shows, for each edge
// and direction, the maximum number of messages in flight (sent and not yet used). A receive is posted as soon as the
// message that is one more than that number of uses earlier has been used, but not before
//  - the rank has computed the last of its own stages that the microbatch passes on its way to the sender, and
//  - all receives of earlier messages from the same rank are posted: between two ranks, messages are received in the
//    order of sending, for transports that support no other order.
//
// So every send of the walk finds its receive posted. The dependencies between ranks do not depend on the order in
// which ranks run, so no order deadlocks, even if sends block. The number of outstanding receives is at most the number
// of messages in flight plus one for each edge.
#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/passes/unchecked.h"
#include "penstock/schedule/verify.h"

namespace penstock::internal {
namespace {

// Position before all actions of a rank.
constexpr int kStart = -1;

// The forwards, or the input gradients, of all stages and microbatches. The turn of a microbatch is its index in the
// order in which the stage computes microbatches.
struct Uses {
  explicit Uses(std::size_t cells)
      : done(cells, 0), position(cells, kStart), turn(cells, 0), position_by_turn(cells, kStart) {}
  // Tables by stage and microbatch: 1 if the walk has passed it, its position in the rank's actions, and its turn.
  std::vector<char> done;
  std::vector<int> position;
  std::vector<int> turn;
  // Positions by stage and turn.
  std::vector<int> position_by_turn;
};

// An edge in one direction.
struct Channel {
  int sender = 0;
  int receiver = 0;
  std::size_t receiver_rank = 0;
  bool crosses = false;
  // Number of turns sent and used by the walk so far, and the largest difference between them.
  int sent = 0;
  int used = 0;
  int most_in_flight = 0;
  // Position, by microbatch, of the last computation on the receiver's rank that the microbatch passes before it
  // reaches the sender; null if there is none.
  const int* local_before = nullptr;
  // Turn by microbatch, and position by turn, of the receiver.
  const int* turn = nullptr;
  const int* position_by_turn = nullptr;

  // Returns the position of the action after which the receive of a microbatch can be posted.
  int posted_after(int microbatch) const {
    const int earlier = turn[microbatch] - (most_in_flight + 1);
    return std::max(local_before == nullptr ? kStart : local_before[microbatch],
                    earlier < 0 ? kStart : position_by_turn[earlier]);
  }
};

class Communication {
 public:
  Communication(const Schedule& schedule, const Schedule& given)
      : schedule_(schedule),
        given_(given),
        graph_(schedule.graph()),
        forward_(schedule.cells()),
        backward_(schedule.cells()),
        channels_to_(static_cast<std::size_t>(schedule.ranks()), 0),
        receives_(static_cast<std::size_t>(schedule.ranks())),
        last_(static_cast<std::size_t>(schedule.ranks())) {
    index();
    for (const Direction direction : {Direction::Forward, Direction::Backward}) add_channels(direction);
    add_collectives();
    walk();
    reserve_receives();
    for (int rank = 0; rank < schedule.ranks(); ++rank) place_receives_of_sends_from(rank);
  }

  Schedule result() const {
    Schedule result = schedule_.without_actions();
    for (int rank = 0; rank < schedule_.ranks(); ++rank) result.assign(rank, list_of(rank));
    return result;
  }

 private:
  struct Receive {
    // Position of the action that it follows, or kStart.
    int after;
    Action action;
  };

  // The last receive so far of a message from `sender`.
  struct LastReceive {
    int sender = kNone;
    int after = kStart;
  };

  // The ranks of a group of stages that share parameters, with true for those that have joined.
  struct Collective {
    std::map<int, bool> ranks;
  };

  Channel& channel(Direction direction, int e) {
    return channels_[static_cast<std::size_t>(direction)][static_cast<std::size_t>(e)];
  }
  const Channel& channel(Direction direction, int e) const {
    return channels_[static_cast<std::size_t>(direction)][static_cast<std::size_t>(e)];
  }
  std::size_t cell(const Action& part) const { return schedule_.cell(part.stage, part.microbatch); }

  void index() {
    std::vector<int> forwards(static_cast<std::size_t>(schedule_.stages()), 0);
    std::vector<int> backwards(static_cast<std::size_t>(schedule_.stages()), 0);
    const auto note = [&](Uses& uses, std::vector<int>& turns, const Action& part, int position) {
      const int turn = turns[static_cast<std::size_t>(part.stage)]++;
      uses.position[cell(part)] = position;
      uses.turn[cell(part)] = turn;
      uses.position_by_turn[schedule_.cell(part.stage, turn)] = position;
    };
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      int position = 0;
      for (const Action& action : schedule_.actions(rank)) {
        for_each_part(action, [&](const Action& part) {
          if (is_forward(part)) note(forward_, forwards, part, position);
          if (makes_input_gradient(part)) note(backward_, backwards, part, position);
        });
        ++position;
      }
    }
  }

  void add_channels(Direction direction) {
    const Uses& uses = direction == Direction::Forward ? forward_ : backward_;
    for (const Edge& edge : graph_.edges()) {
      Channel next;
      next.sender = direction == Direction::Forward ? edge.from : edge.to;
      next.receiver = direction == Direction::Forward ? edge.to : edge.from;
      const int receiver_rank = schedule_.placement().rank_of(next.receiver);
      next.receiver_rank = static_cast<std::size_t>(receiver_rank);
      next.crosses = schedule_.placement().rank_of(next.sender) != receiver_rank;
      next.turn = &uses.turn[schedule_.cell(next.receiver, 0)];
      next.position_by_turn = &uses.position_by_turn[schedule_.cell(next.receiver, 0)];

      // An activation passes the rank's stages before the sender; a gradient, after the forwards of all stages, those
      // after it.
      const auto local = schedule_.placement().stages_of(receiver_rank);
      const auto above = std::ranges::upper_bound(local, next.sender);
      if (direction == Direction::Forward) {
        if (above != local.begin()) next.local_before = &forward_.position[schedule_.cell(*(above - 1), 0)];
      } else {
        next.local_before = above != local.end() ? &backward_.position[schedule_.cell(*above, 0)]
                                                 : &forward_.position[schedule_.cell(local.back(), 0)];
      }
      if (next.crosses) ++channels_to_[next.receiver_rank];
      channels_[static_cast<std::size_t>(direction)].push_back(next);
    }
  }

  void add_collectives() {
    for (const auto& group : graph_.groups()) {
      Collective collective;
      for (const int stage : group) collective.ranks.emplace(schedule_.placement().rank_of(stage), false);
      collectives_.push_back(std::move(collective));
    }
  }

  // Walks all ranks in lock-step, one action of each rank per round.
  void walk() {
    std::vector<std::size_t> next(static_cast<std::size_t>(schedule_.ranks()), 0);
    for (bool progress = true; progress;) {
      progress = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        std::size_t& position = next[static_cast<std::size_t>(rank)];
        const auto actions = schedule_.actions(rank);
        if (position == actions.size() || !is_ready(actions[position], rank)) continue;
        for_each_part(actions[position], [&](const Action& part) { take(part); });
        ++position;
        progress = true;
      }
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (next[static_cast<std::size_t>(rank)] == schedule_.actions(rank).size()) continue;
      require_valid(given_);
      throw ScheduleError(concat("rank ", rank, " does not run to completion."));
    }
  }

  // Returns true if all inputs from other ranks are available, or if all ranks have joined a collective. A pair needs
  // the inputs of both parts before it starts.
  bool is_ready(const Action& action, int rank) {
    if (action.computation == Computation::SumShared) {
      Collective& collective = collectives_[static_cast<std::size_t>(graph_.group_of(action.stage))];
      collective.ranks[rank] = true;
      return std::ranges::all_of(collective.ranks, [](const auto& member) { return member.second; });
    }
    bool ready = true;
    for_each_part(action, [&](const Action& part) {
      if (is_forward(part)) {
        for (const int e : graph_.in_edges(part.stage)) ready &= is_available(Direction::Forward, e, part.microbatch);
      } else if (makes_input_gradient(part)) {
        for (const int e : graph_.out_edges(part.stage)) ready &= is_available(Direction::Backward, e, part.microbatch);
      }
    });
    return ready;
  }

  bool is_available(Direction direction, int e, int microbatch) const {
    const Channel& from = channel(direction, e);
    const Uses& uses = direction == Direction::Forward ? forward_ : backward_;
    return !from.crosses || uses.done[schedule_.cell(from.sender, microbatch)] != 0;
  }

  void take(const Action& part) {
    if (is_forward(part)) {
      forward_.done[cell(part)] = 1;
      for (const int e : graph_.in_edges(part.stage)) ++channel(Direction::Forward, e).used;
      for (const int e : graph_.out_edges(part.stage)) send(channel(Direction::Forward, e), part.microbatch);
    } else if (makes_input_gradient(part)) {
      backward_.done[cell(part)] = 1;
      for (const int e : graph_.out_edges(part.stage)) ++channel(Direction::Backward, e).used;
      for (const int e : graph_.in_edges(part.stage)) send(channel(Direction::Backward, e), part.microbatch);
    }
  }

  static void send(Channel& along, int microbatch) {
    along.sent = std::max(along.sent, along.turn[microbatch] + 1);
    along.most_in_flight = std::max(along.most_in_flight, along.sent - along.used);
  }

  // Calls visit(channel, is_forward) for each message that a part sends, in the order of sending.
  template <class Visit>
  void for_each_send(const Action& part, const Visit& visit) const {
    const bool forwards = is_forward(part);
    if (!forwards && !makes_input_gradient(part)) return;
    for (const int e : forwards ? graph_.out_edges(part.stage) : graph_.in_edges(part.stage)) {
      const Channel& along = channel(forwards ? Direction::Forward : Direction::Backward, e);
      if (along.crosses) visit(along, forwards);
    }
  }

  void reserve_receives() {
    for (std::size_t rank = 0; rank < receives_.size(); ++rank) {
      receives_[rank].reserve(channels_to_[rank] * static_cast<std::size_t>(schedule_.microbatches()));
    }
  }

  // Places the receives of a rank's sends, in the order of sending.
  void place_receives_of_sends_from(int rank) {
    for (const Action& action : schedule_.actions(rank)) {
      for_each_part(action, [&](const Action& part) {
        for_each_send(part, [&](const Channel& along, bool forwards) {
          LastReceive& last = last_[along.receiver_rank];
          if (last.sender != rank) last = {rank, kStart};
          last.after = std::max(last.after, along.posted_after(part.microbatch));
          const Computation computation = forwards ? Computation::RecvForward : Computation::RecvBackward;
          receives_[along.receiver_rank].push_back(
              {last.after, message(along.receiver, computation, part.microbatch, part.stage)});
        });
      });
    }
  }

  std::vector<Action> list_of(int rank) const {
    const auto actions = schedule_.actions(rank);
    const std::vector<Receive>& receives = receives_[static_cast<std::size_t>(rank)];
    // Linked lists of the receives before all actions (slot 0) and after each action, starting at first[slot].
    constexpr int kEnd = -1;
    std::vector<int> first(actions.size() + 1, kEnd);
    std::vector<int> next(receives.size());
    for (std::size_t i = receives.size(); i-- > 0;) {
      const std::size_t slot = static_cast<std::size_t>(receives[i].after) + 1;
      next[i] = std::exchange(first[slot], static_cast<int>(i));
    }

    std::vector<Action> list;
    list.reserve(actions.size() + 2 * receives.size());
    const auto add_receives = [&](std::size_t slot) {
      for (int i = first[slot]; i != kEnd; i = next[static_cast<std::size_t>(i)]) {
        list.push_back(receives[static_cast<std::size_t>(i)].action);
      }
    };
    add_receives(0);
    for (std::size_t position = 0; position < actions.size(); ++position) {
      list.push_back(actions[position]);
      add_receives(position + 1);
      for_each_part(actions[position], [&](const Action& part) {
        for_each_send(part, [&](const Channel& along, bool forwards) {
          const Computation computation = forwards ? Computation::SendForward : Computation::SendBackward;
          list.push_back(message(part.stage, computation, part.microbatch, along.receiver));
        });
      });
    }
    return list;
  }

  const Schedule& schedule_;
  const Schedule& given_;
  const StageGraph& graph_;
  Uses forward_;
  Uses backward_;
  // Channels by direction and edge.
  std::array<std::vector<Channel>, 2> channels_;
  // Collectives by group.
  std::vector<Collective> collectives_;
  // Number of channels from other ranks by receiving rank.
  std::vector<std::size_t> channels_to_;
  // Receives by rank; those of each sender are in the order of sending.
  std::vector<std::vector<Receive>> receives_;
  // Last receive by receiving rank.
  std::vector<LastReceive> last_;
};

}  // namespace

namespace unchecked {

Schedule add_communication(const Schedule& schedule, const Schedule& given) {
  return Communication(schedule, given).result();
}

}  // namespace unchecked
}  // namespace penstock::internal
