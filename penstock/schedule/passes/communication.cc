// Where sends and receives go.
//
// A send follows at once what it sends. For the receives, the lists are walked once in lock-step, each rank taking an
// action in its turn when its inputs are there. That is one order in which all can run; it shows for each edge and
// direction how many messages are under way at most: sent, and not used yet. A receive is posted when the message so
// many uses earlier, and one more, has been used, but not before the rank itself has done its part of that microbatch's
// way to the sender, nor before the receives of what the same rank sends it earlier: between two ranks, messages are
// received in the order of sending, for transports that know no other.
//
// So at every send of that walk the receive is posted already. Who waits for whom does not depend on the order in which
// ranks run, so no order deadlocks, even if sends block. And the receives outstanding are never more than messages under
// way, and one for each edge.
#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/error.h"
#include "penstock/schedule/passes/unchecked.h"
#include "penstock/schedule/verify.h"

namespace penstock {
namespace {

// The two ways of an edge.
enum class Way { Forward, Backward };

// Before all actions of a list.
constexpr int kStart = -1;

// The forwards, or the input gradients, of all stages and microbatches.
struct Uses {
  explicit Uses(std::size_t cells) : done(cells, 0), at(cells, kStart), turn(cells, 0), at_by_turn(cells, kStart) {}
  // By stage and microbatch: whether the walk has passed it, where it stands in its rank's list, as which of its stage.
  std::vector<char> done;
  std::vector<int> at;
  std::vector<int> turn;
  // By stage and turn: where it stands.
  std::vector<int> at_by_turn;
};

// An edge in one direction.
struct Channel {
  int sender = 0;
  int receiver = 0;
  std::size_t receiver_rank = 0;
  bool crosses = false;
  // One more than the last turn that has been sent; how many have been used; the most between them.
  int sent = 0;
  int used = 0;
  int most = 0;
  // By microbatch: the last action of the receiver's rank that it passes on its way to the sender; or nothing.
  const int* own_part = nullptr;
  // By microbatch, and by turn: of the receiver.
  const int* turn = nullptr;
  const int* at_by_turn = nullptr;

  // The action after which the receive of a microbatch can be posted.
  int posted_after(int microbatch) const {
    const int earlier = turn[microbatch] - (most + 1);
    return std::max(own_part == nullptr ? kStart : own_part[microbatch], earlier < 0 ? kStart : at_by_turn[earlier]);
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
    for (const Way way : {Way::Forward, Way::Backward}) add_channels(way);
    add_meetings();
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
    // Behind this action of the rank's list, or kStart.
    int after;
    Action action;
  };

  // Where the last receive stands so far of what a rank sends.
  struct LastReceive {
    int sender = kNone;
    int after = kStart;
  };

  // The ranks of a group of stages that share parameters, and whether each has come.
  struct Meeting {
    std::map<int, bool> ranks;
  };

  Channel& channel(Way way, int e) { return channels_[static_cast<std::size_t>(way)][static_cast<std::size_t>(e)]; }
  const Channel& channel(Way way, int e) const {
    return channels_[static_cast<std::size_t>(way)][static_cast<std::size_t>(e)];
  }
  std::size_t cell(const Action& part) const { return schedule_.cell(part.stage, part.microbatch); }

  void index() {
    std::vector<int> forwards(static_cast<std::size_t>(schedule_.stages()), 0);
    std::vector<int> backwards(static_cast<std::size_t>(schedule_.stages()), 0);
    const auto note = [&](Uses& uses, std::vector<int>& turns, const Action& part, int position) {
      const int turn = turns[static_cast<std::size_t>(part.stage)]++;
      uses.at[cell(part)] = position;
      uses.turn[cell(part)] = turn;
      uses.at_by_turn[schedule_.cell(part.stage, turn)] = position;
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

  void add_channels(Way way) {
    const Uses& uses = way == Way::Forward ? forward_ : backward_;
    for (const Edge& edge : graph_.edges()) {
      Channel next;
      next.sender = way == Way::Forward ? edge.from : edge.to;
      next.receiver = way == Way::Forward ? edge.to : edge.from;
      const int receiver_rank = schedule_.placement().rank_of(next.receiver);
      next.receiver_rank = static_cast<std::size_t>(receiver_rank);
      next.crosses = schedule_.placement().rank_of(next.sender) != receiver_rank;
      next.turn = &uses.turn[schedule_.cell(next.receiver, 0)];
      next.at_by_turn = &uses.at_by_turn[schedule_.cell(next.receiver, 0)];

      // Forwards pass the rank's stages before the sender, gradients those behind it after the forwards of all.
      const auto local = schedule_.placement().stages_of(receiver_rank);
      const auto above = std::ranges::upper_bound(local, next.sender);
      if (way == Way::Forward) {
        if (above != local.begin()) next.own_part = &forward_.at[schedule_.cell(*(above - 1), 0)];
      } else {
        next.own_part = above != local.end() ? &backward_.at[schedule_.cell(*above, 0)]
                                             : &forward_.at[schedule_.cell(local.back(), 0)];
      }
      if (next.crosses) ++channels_to_[next.receiver_rank];
      channels_[static_cast<std::size_t>(way)].push_back(next);
    }
  }

  void add_meetings() {
    for (const auto& group : graph_.groups()) {
      Meeting meeting;
      for (const int stage : group) meeting.ranks.emplace(schedule_.placement().rank_of(stage), false);
      meetings_.push_back(std::move(meeting));
    }
  }

  // All ranks in lock-step, an action a turn.
  void walk() {
    std::vector<std::size_t> next(static_cast<std::size_t>(schedule_.ranks()), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        std::size_t& position = next[static_cast<std::size_t>(rank)];
        const auto actions = schedule_.actions(rank);
        if (position == actions.size() || !is_ready(actions[position], rank)) continue;
        for_each_part(actions[position], [&](const Action& part) { take(part); });
        ++position;
        moved = true;
      }
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (next[static_cast<std::size_t>(rank)] == schedule_.actions(rank).size()) continue;
      require_valid(given_);
      throw ScheduleError("rank " + std::to_string(rank) + " does not come to its end.");
    }
  }

  // Whether what other ranks make for it is there, or all have come to a meeting; a pair needs all before it begins.
  bool is_ready(const Action& action, int rank) {
    if (action.computation == Computation::SumShared) {
      Meeting& meeting = meetings_[static_cast<std::size_t>(graph_.group_of(action.stage))];
      meeting.ranks[rank] = true;
      return std::ranges::all_of(meeting.ranks, [](const auto& member) { return member.second; });
    }
    bool ready = true;
    for_each_part(action, [&](const Action& part) {
      if (is_forward(part)) {
        for (const int e : graph_.in_edges(part.stage)) ready &= is_there(Way::Forward, e, part.microbatch);
      } else if (makes_input_gradient(part)) {
        for (const int e : graph_.out_edges(part.stage)) ready &= is_there(Way::Backward, e, part.microbatch);
      }
    });
    return ready;
  }

  bool is_there(Way way, int e, int microbatch) const {
    const Channel& from = channel(way, e);
    const Uses& uses = way == Way::Forward ? forward_ : backward_;
    return !from.crosses || uses.done[schedule_.cell(from.sender, microbatch)] != 0;
  }

  void take(const Action& part) {
    if (is_forward(part)) {
      forward_.done[cell(part)] = 1;
      for (const int e : graph_.in_edges(part.stage)) ++channel(Way::Forward, e).used;
      for (const int e : graph_.out_edges(part.stage)) send(channel(Way::Forward, e), part.microbatch);
    } else if (makes_input_gradient(part)) {
      backward_.done[cell(part)] = 1;
      for (const int e : graph_.out_edges(part.stage)) ++channel(Way::Backward, e).used;
      for (const int e : graph_.in_edges(part.stage)) send(channel(Way::Backward, e), part.microbatch);
    }
  }

  static void send(Channel& along, int microbatch) {
    along.sent = std::max(along.sent, along.turn[microbatch] + 1);
    along.most = std::max(along.most, along.sent - along.used);
  }

  // Calls visit(channel, is_forward) for each message that a part sends, in the order of sending.
  template <class Visit>
  void for_each_send(const Action& part, const Visit& visit) const {
    const bool forwards = is_forward(part);
    if (!forwards && !makes_input_gradient(part)) return;
    for (const int e : forwards ? graph_.out_edges(part.stage) : graph_.in_edges(part.stage)) {
      const Channel& along = channel(forwards ? Way::Forward : Way::Backward, e);
      if (along.crosses) visit(along, forwards);
    }
  }

  void reserve_receives() {
    for (std::size_t rank = 0; rank < receives_.size(); ++rank) {
      receives_[rank].reserve(channels_to_[rank] * static_cast<std::size_t>(schedule_.microbatches()));
    }
  }

  // The receives that answer a rank's sends, in the order of sending.
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
    // The receives before all actions and behind each, as lists of indices that begin at first[slot].
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
  // By way and edge.
  std::array<std::vector<Channel>, 2> channels_;
  // By group.
  std::vector<Meeting> meetings_;
  // By rank: channels from other ranks.
  std::vector<std::size_t> channels_to_;
  // By rank; of each sender in the order of sending.
  std::vector<std::vector<Receive>> receives_;
  // By rank that receives.
  std::vector<LastReceive> last_;
};

}  // namespace

namespace unchecked {

Schedule add_communication(const Schedule& schedule, const Schedule& given) {
  return Communication(schedule, given).result();
}

}  // namespace unchecked
}  // namespace penstock
