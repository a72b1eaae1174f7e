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
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/verify.h"

namespace penstock {
namespace {

// The two ways of an edge.
enum class Way { Forward, Backward };

class Communication {
 public:
  explicit Communication(const Schedule& schedule)
      : schedule_(schedule),
        forward_at_(schedule.cells(), kNowhere),
        backward_at_(schedule.cells(), kNowhere),
        forward_use_(schedule.cells(), 0),
        backward_use_(schedule.cells(), 0),
        under_way_{std::vector<UnderWay>(schedule.graph().edges().size()),
                   std::vector<UnderWay>(schedule.graph().edges().size())} {
    index();
    walk();
  }

  Schedule result() const {
    Schedule result = schedule_.without_actions();
    for (int rank = 0; rank < schedule_.ranks(); ++rank) result.assign(rank, list_of(rank));
    return result;
  }

 private:
  static constexpr int kNowhere = -1;

  struct UnderWay {
    // One more than the last, in the order of use, that has been sent; how many have been used; the most between them.
    int sent = 0;
    int used = 0;
    int most = 0;
  };

  struct Receive {
    // Behind this action of the rank's list, or kNowhere: before all.
    int after;
    // Who sends it, and when: two for each action of the sender's list, since a pair sends first what its first part made.
    int sender_rank;
    int sent_at;
    Action action;
  };

  bool crosses(const Edge& edge) const {
    return schedule_.placement().rank_of(edge.from) != schedule_.placement().rank_of(edge.to);
  }
  const Edge& edge(int index) const { return schedule_.graph().edges()[static_cast<std::size_t>(index)]; }
  UnderWay& under_way(Way way, int edge) {
    return under_way_[static_cast<std::size_t>(way)][static_cast<std::size_t>(edge)];
  }
  std::size_t cell(const Action& part) const { return schedule_.cell(part.stage, part.microbatch); }

  // Where in its rank's list each stage has its forward and its input gradient of each microbatch, and as which of its
  // stage.
  void index() {
    std::vector<int> forwards(static_cast<std::size_t>(schedule_.stages()), 0);
    std::vector<int> backwards(static_cast<std::size_t>(schedule_.stages()), 0);
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      int position = 0;
      for (const Action& action : schedule_.actions(rank)) {
        for_each_part(action, [&](const Action& part) {
          if (is_forward(part)) {
            forward_at_[cell(part)] = position;
            forward_use_[cell(part)] = forwards[static_cast<std::size_t>(part.stage)]++;
          } else if (makes_input_gradient(part)) {
            backward_at_[cell(part)] = position;
            backward_use_[cell(part)] = backwards[static_cast<std::size_t>(part.stage)]++;
          }
        });
        ++position;
      }
    }
  }

  // All ranks in lock-step, an action a turn.
  void walk() {
    std::vector<char> forward_done(schedule_.cells(), 0);
    std::vector<char> backward_done(schedule_.cells(), 0);
    const auto ready = [&](const Action& part, const Action* before) {
      const auto done = [&](const std::vector<char>& table, int stage) {
        const bool just_made = before != nullptr && before->stage == stage && before->microbatch == part.microbatch &&
                               (&table == &forward_done ? is_forward(*before) : makes_input_gradient(*before));
        return just_made || table[schedule_.cell(stage, part.microbatch)] != 0;
      };
      if (is_forward(part)) {
        return std::ranges::all_of(schedule_.graph().in_edges(part.stage),
                                   [&](int e) { return done(forward_done, edge(e).from); });
      }
      if (makes_input_gradient(part)) {
        return std::ranges::all_of(schedule_.graph().out_edges(part.stage),
                                   [&](int e) { return done(backward_done, edge(e).to); });
      }
      return true;
    };
    const auto take = [&](const Action& part) {
      if (is_forward(part)) {
        forward_done[cell(part)] = 1;
        for (const int e : schedule_.graph().in_edges(part.stage)) use(Way::Forward, e);
        for (const int e : schedule_.graph().out_edges(part.stage)) {
          send(Way::Forward, e, forward_use_[schedule_.cell(edge(e).to, part.microbatch)]);
        }
      } else if (makes_input_gradient(part)) {
        backward_done[cell(part)] = 1;
        for (const int e : schedule_.graph().out_edges(part.stage)) use(Way::Backward, e);
        for (const int e : schedule_.graph().in_edges(part.stage)) {
          send(Way::Backward, e, backward_use_[schedule_.cell(edge(e).from, part.microbatch)]);
        }
      }
    };

    std::vector<std::size_t> next(static_cast<std::size_t>(schedule_.ranks()), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < schedule_.ranks(); ++rank) {
        std::size_t& position = next[static_cast<std::size_t>(rank)];
        if (position == schedule_.actions(rank).size()) continue;
        const Action& action = schedule_.actions(rank)[position];
        const Action first = action.is_overlap() ? action.first() : action;
        if (!ready(first, nullptr) || (action.is_overlap() && !ready(action.second(), &first))) continue;
        for_each_part(action, take);
        ++position;
        moved = true;
      }
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (next[static_cast<std::size_t>(rank)] == schedule_.actions(rank).size()) continue;
      require_valid(schedule_);
      throw ScheduleError("rank " + std::to_string(rank) + " does not come to its end.");
    }
  }

  void send(Way way, int e, int use) {
    UnderWay& messages = under_way(way, e);
    messages.sent = std::max(messages.sent, use + 1);
    messages.most = std::max(messages.most, messages.sent - messages.used);
  }

  void use(Way way, int e) { ++under_way(way, e).used; }

  std::vector<Action> list_of(int rank) const {
    const auto actions = schedule_.actions(rank);
    std::vector<Receive> receives;
    for (const int stage : schedule_.placement().stages_of(rank)) {
      for (const int e : schedule_.graph().in_edges(stage)) {
        if (crosses(edge(e))) add_receives(receives, Way::Forward, e);
      }
    }
    for (const int stage : schedule_.placement().stages_of(rank)) {
      for (const int e : schedule_.graph().out_edges(stage)) {
        if (crosses(edge(e))) add_receives(receives, Way::Backward, e);
      }
    }
    put_into_order_of_sending(receives);

    std::vector<Action> list;
    list.reserve(actions.size() + 2 * receives.size());
    auto receive = receives.begin();
    const auto add_posted_after = [&](int position) {
      for (; receive != receives.end() && receive->after == position; ++receive) list.push_back(receive->action);
    };
    add_posted_after(kNowhere);
    for (int position = 0; position < static_cast<int>(actions.size()); ++position) {
      list.push_back(actions[static_cast<std::size_t>(position)]);
      add_posted_after(position);
      for_each_part(actions[static_cast<std::size_t>(position)], [&](const Action& part) { add_sends(list, part); });
    }
    return list;
  }

  static void put_into_order_of_sending(std::vector<Receive>& receives) {
    // Of one action, edges are served in the order in which they stand here already.
    std::ranges::stable_sort(receives, {}, [](const Receive& r) { return std::pair(r.sender_rank, r.sent_at); });
    for (std::size_t i = 1; i < receives.size(); ++i) {
      const Receive& before = receives[i - 1];
      if (before.sender_rank == receives[i].sender_rank) receives[i].after = std::max(receives[i].after, before.after);
    }
    std::ranges::stable_sort(receives, {}, &Receive::after);
  }

  void add_sends(std::vector<Action>& list, const Action& part) const {
    if (is_forward(part)) {
      for (const int e : schedule_.graph().out_edges(part.stage)) {
        if (crosses(edge(e)))
          list.push_back(message(part.stage, Computation::SendForward, part.microbatch, edge(e).to));
      }
    } else if (makes_input_gradient(part)) {
      for (const int e : schedule_.graph().in_edges(part.stage)) {
        if (crosses(edge(e)))
          list.push_back(message(part.stage, Computation::SendBackward, part.microbatch, edge(e).from));
      }
    }
  }

  // The receives of one edge, in the order of their use.
  void add_receives(std::vector<Receive>& receives, Way way, int e) const {
    const bool forwards = way == Way::Forward;
    const int stage = forwards ? edge(e).to : edge(e).from;
    const int sender = forwards ? edge(e).from : edge(e).to;
    const std::vector<int>& at = forwards ? forward_at_ : backward_at_;
    const std::vector<int>& use = forwards ? forward_use_ : backward_use_;

    std::vector<int> by_use(static_cast<std::size_t>(schedule_.microbatches()), kNowhere);
    for (int mb = 0; mb < schedule_.microbatches(); ++mb) {
      const std::size_t index = schedule_.cell(stage, mb);
      if (at[index] != kNowhere) by_use[static_cast<std::size_t>(use[index])] = mb;
    }
    const int ahead = under_way_[static_cast<std::size_t>(way)][static_cast<std::size_t>(e)].most + 1;
    for (int k = 0; k < schedule_.microbatches() && by_use[static_cast<std::size_t>(k)] != kNowhere; ++k) {
      const int mb = by_use[static_cast<std::size_t>(k)];
      int after = own_part(way, stage, sender, mb);
      if (k >= ahead) after = std::max(after, at[schedule_.cell(stage, by_use[static_cast<std::size_t>(k - ahead)])]);
      const Computation computation = forwards ? Computation::RecvForward : Computation::RecvBackward;
      receives.push_back({after, schedule_.placement().rank_of(sender), sent_at(way, sender, mb),
                          message(stage, computation, mb, sender)});
    }
  }

  int sent_at(Way way, int sender, int mb) const {
    const int position = (way == Way::Forward ? forward_at_ : backward_at_)[schedule_.cell(sender, mb)];
    const Action& action = schedule_.actions(schedule_.placement().rank_of(sender))[static_cast<std::size_t>(position)];
    const Action first = action.is_overlap() ? action.first() : action;
    const bool by_first = first.stage == sender && first.microbatch == mb && is_forward(first) == (way == Way::Forward);
    return 2 * position + (by_first ? 0 : 1);
  }

  // The last action of this rank that a microbatch passes on its way to the sender.
  int own_part(Way way, int stage, int sender, int mb) const {
    const auto local = schedule_.placement().stages_of(schedule_.placement().rank_of(stage));
    const auto above = std::ranges::upper_bound(local, sender);
    if (way == Way::Forward) return above == local.begin() ? kNowhere : forward_at_[schedule_.cell(*(above - 1), mb)];
    if (above != local.end()) return backward_at_[schedule_.cell(*above, mb)];
    return forward_at_[schedule_.cell(local.back(), mb)];
  }

  const Schedule& schedule_;
  // By stage and microbatch.
  std::vector<int> forward_at_;
  std::vector<int> backward_at_;
  std::vector<int> forward_use_;
  std::vector<int> backward_use_;
  // By way and edge.
  std::vector<UnderWay> under_way_[2];
};

}  // namespace

Schedule add_communication(const Schedule& schedule) {
  return Communication(schedule).result();
}

}  // namespace penstock
