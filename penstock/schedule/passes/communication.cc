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
#include <numeric>
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
        forward_(schedule.cells()),
        backward_(schedule.cells()),
        receives_(static_cast<std::size_t>(schedule.ranks())) {
    for (auto& edges : under_way_) edges.resize(schedule.graph().edges().size());
    index();
    walk();
    for (int rank = 0; rank < schedule.ranks(); ++rank) place_receives_of_sends_from(rank);
  }

  Schedule result() const {
    Schedule result = schedule_.without_actions();
    for (int rank = 0; rank < schedule_.ranks(); ++rank) result.assign(rank, list_of(rank));
    return result;
  }

 private:
  static constexpr int kNowhere = -1;

  // The forwards, or the input gradients, of all stages and microbatches.
  struct Uses {
    explicit Uses(std::size_t cells) : at(cells, kNowhere), turn(cells, 0), by_turn(cells, kNowhere) {}
    // By stage and microbatch: where in its rank's list, and as which of its stage.
    std::vector<int> at;
    std::vector<int> turn;
    // By stage and turn: the microbatch.
    std::vector<int> by_turn;
  };

  struct UnderWay {
    // One more than the last, in the order of use, that has been sent; how many have been used; the most between them.
    int sent = 0;
    int used = 0;
    int most = 0;
  };

  struct Receive {
    // Behind this action of the rank's list, or kNowhere: before all.
    int after;
    Action action;
  };

  bool crosses(const Edge& edge) const {
    return schedule_.placement().rank_of(edge.from) != schedule_.placement().rank_of(edge.to);
  }
  const Edge& edge(int index) const { return schedule_.graph().edges()[static_cast<std::size_t>(index)]; }
  static std::size_t index_of(Way way) { return static_cast<std::size_t>(way); }
  UnderWay& under_way(Way way, int edge) { return under_way_[index_of(way)][static_cast<std::size_t>(edge)]; }
  std::size_t cell(const Action& part) const { return schedule_.cell(part.stage, part.microbatch); }

  const Uses& uses(Way way) const { return way == Way::Forward ? forward_ : backward_; }

  void index() {
    std::vector<int> forwards(static_cast<std::size_t>(schedule_.stages()), 0);
    std::vector<int> backwards(static_cast<std::size_t>(schedule_.stages()), 0);
    const auto note = [&](Uses& uses, std::vector<int>& turns, const Action& part, int position) {
      const int turn = turns[static_cast<std::size_t>(part.stage)]++;
      uses.at[cell(part)] = position;
      uses.turn[cell(part)] = turn;
      uses.by_turn[schedule_.cell(part.stage, turn)] = part.microbatch;
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
          send(Way::Forward, e, forward_.turn[schedule_.cell(edge(e).to, part.microbatch)]);
        }
      } else if (makes_input_gradient(part)) {
        backward_done[cell(part)] = 1;
        for (const int e : schedule_.graph().out_edges(part.stage)) use(Way::Backward, e);
        for (const int e : schedule_.graph().in_edges(part.stage)) {
          send(Way::Backward, e, backward_.turn[schedule_.cell(edge(e).from, part.microbatch)]);
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

  void send(Way way, int e, int turn) {
    UnderWay& messages = under_way(way, e);
    messages.sent = std::max(messages.sent, turn + 1);
    messages.most = std::max(messages.most, messages.sent - messages.used);
  }

  void use(Way way, int e) { ++under_way(way, e).used; }

  // Calls visit(way, edge) for each message that a part sends, in the order of sending.
  template <class Visit>
  void for_each_send(const Action& part, const Visit& visit) const {
    if (is_forward(part)) {
      for (const int e : schedule_.graph().out_edges(part.stage)) {
        if (crosses(edge(e))) visit(Way::Forward, e);
      }
    } else if (makes_input_gradient(part)) {
      for (const int e : schedule_.graph().in_edges(part.stage)) {
        if (crosses(edge(e))) visit(Way::Backward, e);
      }
    }
  }

  // The receives that answer a rank's sends, in the order of sending.
  void place_receives_of_sends_from(int rank) {
    std::vector<int> last(static_cast<std::size_t>(schedule_.ranks()), kNowhere);
    for (const Action& action : schedule_.actions(rank)) {
      for_each_part(action, [&](const Action& part) {
        for_each_send(part, [&](Way way, int e) {
          const bool forwards = way == Way::Forward;
          const int stage = forwards ? edge(e).to : edge(e).from;
          const auto receiver = static_cast<std::size_t>(schedule_.placement().rank_of(stage));
          last[receiver] = std::max(last[receiver], posted_after(way, e, stage, part));
          const Computation computation = forwards ? Computation::RecvForward : Computation::RecvBackward;
          receives_[receiver].push_back({last[receiver], message(stage, computation, part.microbatch, part.stage)});
        });
      });
    }
  }

  // The action of `stage`'s rank after which it can post the receive of what `sent` sends it.
  int posted_after(Way way, int e, int stage, const Action& sent) const {
    const Uses& used = uses(way);
    const int earlier = used.turn[schedule_.cell(stage, sent.microbatch)] -
                        (under_way_[index_of(way)][static_cast<std::size_t>(e)].most + 1);
    const int own = own_part(way, stage, sent);
    return earlier < 0 ? own
                       : std::max(own, used.at[schedule_.cell(stage, used.by_turn[schedule_.cell(stage, earlier)])]);
  }

  // The last action of this rank that a microbatch passes on its way to the sender.
  int own_part(Way way, int stage, const Action& sent) const {
    const auto local = schedule_.placement().stages_of(schedule_.placement().rank_of(stage));
    const auto above = std::ranges::upper_bound(local, sent.stage);
    const auto at = [&](const Uses& uses, int local_stage) {
      return uses.at[schedule_.cell(local_stage, sent.microbatch)];
    };
    if (way == Way::Forward) return above == local.begin() ? kNowhere : at(forward_, *(above - 1));
    return above != local.end() ? at(backward_, *above) : at(forward_, local.back());
  }

  // 0 before all actions, else one more than the action's index.
  static std::size_t slot_of(const Receive& receive) { return static_cast<std::size_t>(receive.after) + 1; }

  std::vector<Action> list_of(int rank) const {
    const auto actions = schedule_.actions(rank);
    const std::vector<Receive>& receives = receives_[static_cast<std::size_t>(rank)];
    // The receives behind each action, and before all: counted, then put in place.
    std::vector<std::size_t> begin(actions.size() + 2, 0);
    for (const Receive& receive : receives) ++begin[slot_of(receive) + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    std::vector<std::size_t> fill = begin;
    std::vector<const Action*> in_place(receives.size());
    for (const Receive& receive : receives) in_place[fill[slot_of(receive)]++] = &receive.action;

    std::vector<Action> list;
    list.reserve(actions.size() + 2 * receives.size());
    const auto add_receives = [&](std::size_t slot) {
      for (std::size_t i = begin[slot]; i < fill[slot]; ++i) list.push_back(*in_place[i]);
    };
    add_receives(0);
    for (std::size_t position = 0; position < actions.size(); ++position) {
      list.push_back(actions[position]);
      add_receives(position + 1);
      for_each_part(actions[position], [&](const Action& part) {
        for_each_send(part, [&](Way way, int e) {
          const bool forwards = way == Way::Forward;
          list.push_back(message(part.stage, forwards ? Computation::SendForward : Computation::SendBackward,
                                 part.microbatch, forwards ? edge(e).to : edge(e).from));
        });
      });
    }
    return list;
  }

  const Schedule& schedule_;
  Uses forward_;
  Uses backward_;
  // By way and edge.
  std::array<std::vector<UnderWay>, 2> under_way_;
  // By rank; of each sender in the order of sending.
  std::vector<std::vector<Receive>> receives_;
};

}  // namespace

Schedule add_communication(const Schedule& schedule) {
  return Communication(schedule).result();
}

}  // namespace penstock
