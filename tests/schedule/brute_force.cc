#include "tests/schedule/brute_force.h"

#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace penstock::internal::testing {
namespace {

// Computation, stage, microbatch and other stage, or kNone.
using Event = std::tuple<Computation, int, int, int>;

// Everything that has happened so far. Entries of a stage are written only by the rank of the stage.
struct History {
  std::set<Event> events;
  std::set<int> unsharded;
  std::set<int> reduced;
  // Pairs of group and rank.
  std::set<std::pair<int, int>> joined;

  bool did(Computation computation, int stage, int microbatch, int other_stage = kNone) const {
    return events.contains({computation, stage, microbatch, other_stage});
  }
  bool made_input_gradient(int stage, int microbatch) const {
    return did(Computation::InputBackward, stage, microbatch) || did(Computation::FullBackward, stage, microbatch);
  }
  bool made_weight_gradient(int stage, int microbatch) const {
    return did(Computation::WeightBackward, stage, microbatch) || did(Computation::FullBackward, stage, microbatch);
  }
};

class Machine {
 public:
  Machine(const Schedule& schedule, const Features& expected) : schedule_(schedule), expected_(expected) {}

  // A rank that fails stops, and the others continue as far as they can, so the result does not depend on the order.
  std::string run(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<int> order;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) order.push_back(rank);

    for (bool progress = true; progress;) {
      progress = false;
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
      for (int rank : order) progress = step(rank) || progress;
    }

    if (!errors_.empty()) return errors_.begin()->second;
    std::string stuck;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (!at_end(rank)) {
        stuck += (stuck.empty() ? "stuck: " : "; ") + place(rank) + " waits for " + waits_for(current(rank));
      }
    }
    return stuck.empty() ? missing_at_end() : stuck;
  }

 private:
  bool at_end(int rank) const { return position_.at(rank) == schedule_.actions(rank).size(); }
  const Action& current(int rank) const { return schedule_.actions(rank)[position_.at(rank)]; }
  std::string place(int rank) const { return "rank " + std::to_string(rank) + " at " + to_string(current(rank)); }

  // Executes the next action of a rank, or joins its collective. Returns false if nothing changed.
  bool step(int rank) {
    position_.try_emplace(rank, 0);
    if (errors_.contains(rank) || at_end(rank)) return false;
    const Action& action = current(rank);

    if (in_collective_.contains(rank)) {
      if (!waits_for(action).empty()) return false;
      in_collective_.erase(rank);
      ++position_[rank];
      return true;
    }

    if (std::string error = local_error(rank, action); !error.empty()) {
      errors_[rank] = place(rank) + ": " + error;
      return true;
    }
    if (action.computation == Computation::SumShared) {
      // A rank joins before it waits for the others.
      history_.joined.insert({group_of(action.stage), rank});
      in_collective_.insert(rank);
      return true;
    }
    if (!waits_for(action).empty()) return false;
    for_each_part(action, [&](const Action& part) { record(part, history_); });
    ++position_[rank];
    return true;
  }

  // Returns an error of an action that follows from earlier actions of its own rank, which waiting cannot resolve. The
  // rules are in the order of schedule.h; split up, they would be harder to compare.
  // NOLINTNEXTLINE(readability-function-cognitive-complexity)
  std::string local_error(int rank, const Action& action) const {
    if (!action.is_overlap()) return local_error(rank, action, history_);
    for (const Action& part : {action.first(), action.second()}) {
      if (!is_plain_compute(part.computation)) return "a part is no computation";
    }
    if (std::string error = local_error(rank, action.first(), history_); !error.empty()) return error;
    History after_first = history_;
    record(action.first(), after_first);
    return local_error(rank, action.second(), after_first);
  }

  std::string local_error(int rank, const Action& action, const History& history) const {
    const int stage = action.stage;
    const int microbatch = action.microbatch;
    if (stage < 0 || stage >= schedule_.stages()) return "no such stage";
    if (rank_of(stage) != rank) return "the stage is on another rank";
    const bool computes = is_plain_compute(action.computation) || action.computation == Computation::Recompute;
    if (computes || action.is_message()) {
      if (microbatch < 0 || microbatch >= schedule_.microbatches()) return "no such microbatch";
    }
    if (computes) {
      if (action.computation != Computation::Forward && !expected_.backward) return "a backward in a forward schedule";
      if (expected_.sharding && !history.unsharded.contains(stage)) return "the stage is sharded";
    }
    if (action.is_message()) return message_error(action, history);

    switch (action.computation) {
      case Computation::Forward:
        if (history.did(Computation::Forward, stage, microbatch)) return "a second forward";
        for (int source : sources_of(stage)) {
          if (rank_of(source) == rank) {
            if (!history.did(Computation::Forward, source, microbatch)) return "before a forward that feeds it";
          } else if (expected_.communication) {
            if (!history.did(Computation::RecvForward, stage, microbatch, source)) return "before its RECV_F";
          }
        }
        return {};
      case Computation::InputBackward:
      case Computation::FullBackward:
        if (history.made_input_gradient(stage, microbatch)) return "a second backward";
        if (!history.did(Computation::Forward, stage, microbatch)) return "before its forward";
        for (int target : targets_of(stage)) {
          if (rank_of(target) == rank) {
            if (!history.made_input_gradient(target, microbatch)) return "before a backward that feeds it";
          } else if (expected_.communication) {
            if (!history.did(Computation::RecvBackward, stage, microbatch, target)) return "before its RECV_B";
          }
        }
        return {};
      case Computation::WeightBackward:
        if (history.made_weight_gradient(stage, microbatch)) return "a second weight gradient";
        if (!history.did(Computation::InputBackward, stage, microbatch)) return "before its input backward";
        return {};
      case Computation::Recompute:
        if (history.did(Computation::Recompute, stage, microbatch)) return "a second recomputation";
        if (!history.did(Computation::Forward, stage, microbatch)) return "before its forward";
        if (history.made_input_gradient(stage, microbatch)) return "after its backward";
        return {};
      case Computation::Unshard:
        if (!expected_.sharding) return "sharding is not expected";
        if (history.unsharded.contains(stage)) return "the stage is unsharded already";
        return {};
      case Computation::Reshard:
        if (!expected_.sharding) return "sharding is not expected";
        if (!history.unsharded.contains(stage)) return "the stage is sharded already";
        return {};
      case Computation::ReduceGrad:
        if (!expected_.reduction || !expected_.backward) return "a reduction is not expected";
        if (history.reduced.contains(stage)) return "a second reduction";
        if (!all_weight_gradients(stage, history)) return "before the last weight gradient";
        return {};
      case Computation::SumShared:
        if (!expected_.shared_sums) return "a shared sum is not expected";
        if (group_of(stage) < 0) return "the stage shares nothing";
        if (history.joined.contains({group_of(stage), rank})) return "a second shared sum";
        for (int member : members_of(group_of(stage))) {
          if (rank_of(member) != rank) continue;
          if (!all_weight_gradients(member, history)) return "before the last weight gradient of the group";
          if (expected_.reduction && !history.reduced.contains(member)) return "before a reduction of the group";
        }
        return {};
      default: return "no such computation";
    }
  }

  std::string message_error(const Action& action, const History& history) const {
    const int stage = action.stage;
    const int microbatch = action.microbatch;
    const int other = action.other_stage;
    const bool activation =
        action.computation == Computation::SendForward || action.computation == Computation::RecvForward;
    if (!expected_.communication) return "communication is not expected";
    if (!activation && !expected_.backward) return "a gradient in a forward schedule";

    const bool leaves_along_edge =
        action.computation == Computation::SendForward || action.computation == Computation::RecvBackward;
    if (!has_edge(leaves_along_edge ? stage : other, leaves_along_edge ? other : stage)) return "no such edge";
    if (rank_of(stage) == rank_of(other)) return "a message within a rank";
    if (history.did(action.computation, stage, microbatch, other)) return "a second time";

    if (action.computation == Computation::SendForward && !history.did(Computation::Forward, stage, microbatch)) {
      return "before its forward";
    }
    if (action.computation == Computation::SendBackward && !history.made_input_gradient(stage, microbatch)) {
      return "before its backward";
    }
    return {};
  }

  // Returns what an action without a local error still needs from other ranks; empty if it can run.
  std::string waits_for(const Action& action) const {
    const int stage = action.stage;
    const int microbatch = action.microbatch;
    switch (action.computation) {
      case Computation::Overlap: {
        const std::string first = waits_for(action.first());
        return first.empty() ? waits_for(action.second()) : first;
      }
      case Computation::Forward:
        for (int source : sources_of(stage)) {
          if (rank_of(source) == rank_of(stage)) continue;
          if (expected_.communication) {
            const Action send = message(source, Computation::SendForward, microbatch, stage);
            if (!did(send)) return to_string(send);
          } else if (!did(forward(source, microbatch))) {
            return to_string(forward(source, microbatch));
          }
        }
        return {};
      case Computation::InputBackward:
      case Computation::FullBackward:
        for (int target : targets_of(stage)) {
          if (rank_of(target) == rank_of(stage)) continue;
          if (expected_.communication) {
            const Action send = message(target, Computation::SendBackward, microbatch, stage);
            if (!did(send)) return to_string(send);
          } else if (!history_.made_input_gradient(target, microbatch)) {
            return to_string(full_backward(target, microbatch));
          }
        }
        return {};
      case Computation::SendForward: {
        const Action recv = message(action.other_stage, Computation::RecvForward, microbatch, stage);
        return did(recv) ? "" : to_string(recv);
      }
      case Computation::SendBackward: {
        const Action recv = message(action.other_stage, Computation::RecvBackward, microbatch, stage);
        return did(recv) ? "" : to_string(recv);
      }
      case Computation::SumShared:
        for (int member : members_of(group_of(stage))) {
          if (!history_.joined.contains({group_of(stage), rank_of(member)})) {
            return "rank " + std::to_string(rank_of(member)) + " to join";
          }
        }
        return {};
      default: return {};
    }
  }

  static void record(const Action& action, History& history) {
    switch (action.computation) {
      case Computation::Unshard: history.unsharded.insert(action.stage); break;
      case Computation::Reshard: history.unsharded.erase(action.stage); break;
      case Computation::ReduceGrad: history.reduced.insert(action.stage); break;
      default: history.events.insert(event_of(action));
    }
  }

  std::string missing_at_end() const {
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      const std::string name = "stage " + std::to_string(stage);
      for (int microbatch = 0; microbatch < schedule_.microbatches(); ++microbatch) {
        if (!did(forward(stage, microbatch))) return name + " lacks a forward";
        if (!expected_.backward) continue;
        if (!history_.made_input_gradient(stage, microbatch)) return name + " lacks an input gradient";
        if (!history_.made_weight_gradient(stage, microbatch)) return name + " lacks a weight gradient";
      }
      if (history_.unsharded.contains(stage)) return name + " stays unsharded";
      if (expected_.reduction && expected_.backward && !history_.reduced.contains(stage)) {
        return name + " is not reduced";
      }
      if (expected_.shared_sums && group_of(stage) >= 0 &&
          !history_.joined.contains({group_of(stage), rank_of(stage)})) {
        return name + " is not summed";
      }
    }
    if (!expected_.communication) return {};
    for (const Edge& edge : schedule_.graph().edges()) {
      if (rank_of(edge.from) == rank_of(edge.to)) continue;
      for (int microbatch = 0; microbatch < schedule_.microbatches(); ++microbatch) {
        std::vector<Action> messages = {message(edge.from, Computation::SendForward, microbatch, edge.to),
                                        message(edge.to, Computation::RecvForward, microbatch, edge.from)};
        if (expected_.backward) {
          messages.push_back(message(edge.to, Computation::SendBackward, microbatch, edge.from));
          messages.push_back(message(edge.from, Computation::RecvBackward, microbatch, edge.to));
        }
        for (const Action& needed : messages) {
          if (!did(needed)) return "no " + to_string(needed);
        }
      }
    }
    return {};
  }

  static Event event_of(const Action& action) {
    return {action.computation, action.stage, action.microbatch, action.is_message() ? action.other_stage : kNone};
  }
  bool did(const Action& action) const { return history_.events.contains(event_of(action)); }

  static bool is_plain_compute(Computation computation) {
    return computation == Computation::Forward || computation == Computation::InputBackward ||
           computation == Computation::WeightBackward || computation == Computation::FullBackward;
  }

  bool all_weight_gradients(int stage, const History& history) const {
    for (int microbatch = 0; microbatch < schedule_.microbatches(); ++microbatch) {
      if (!history.made_weight_gradient(stage, microbatch)) return false;
    }
    return true;
  }

  int rank_of(int stage) const { return schedule_.placement().rank_of(stage); }
  bool has_edge(int from, int to) const {
    for (const Edge& edge : schedule_.graph().edges()) {
      if (edge.from == from && edge.to == to) return true;
    }
    return false;
  }
  std::vector<int> sources_of(int stage) const {
    std::vector<int> sources;
    for (const Edge& edge : schedule_.graph().edges()) {
      if (edge.to == stage) sources.push_back(edge.from);
    }
    return sources;
  }
  std::vector<int> targets_of(int stage) const {
    std::vector<int> targets;
    for (const Edge& edge : schedule_.graph().edges()) {
      if (edge.from == stage) targets.push_back(edge.to);
    }
    return targets;
  }
  std::vector<int> members_of(int group) const { return schedule_.graph().groups()[static_cast<std::size_t>(group)]; }
  int group_of(int stage) const {
    for (int group = 0; group < static_cast<int>(schedule_.graph().groups().size()); ++group) {
      for (int member : members_of(group)) {
        if (member == stage) return group;
      }
    }
    return -1;
  }

  const Schedule& schedule_;
  const Features& expected_;
  History history_;
  // Next action by rank, errors by rank, and the ranks in a SUM_SHARED.
  std::map<int, std::size_t> position_;
  std::map<int, std::string> errors_;
  std::set<int> in_collective_;
};

}  // namespace

std::string brute_force(const Schedule& schedule, const Features& expected, std::uint64_t seed) {
  return Machine(schedule, expected).run(seed);
}

}  // namespace penstock::internal::testing
