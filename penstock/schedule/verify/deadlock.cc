// The second pass of the verifier runs all ranks against each other, with sends that block until their receive is
// posted. A rank that is blocked at the end waits for another blocked rank, so following the waits finds a cycle.
#include <algorithm>
#include <optional>

#include "penstock/base/text.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify/tables.h"

namespace penstock::internal {
namespace {

class DeadlockChecker : VerifierTables {
 public:
  DeadlockChecker(const Schedule& schedule, const Features& expected) : VerifierTables(schedule, expected) {}

  void run() {
    clear();
    const auto ranks = static_cast<std::size_t>(schedule_.ranks());
    next_.assign(ranks, 0);
    queued_.assign(ranks, 1);
    queue_.clear();
    for (int rank = schedule_.ranks() - 1; rank >= 0; --rank) queue_.push_back(rank);
    while (!queue_.empty()) {
      const int rank = queue_.back();
      queue_.pop_back();
      queued_[static_cast<std::size_t>(rank)] = 0;
      advance(rank);
    }
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      if (next_[static_cast<std::size_t>(rank)] < schedule_.actions(rank).size()) fail_deadlock(rank);
    }
  }

 private:
  // An action of another rank that a rank waits for.
  struct Wait {
    Action for_action;
    int on_rank;
  };

  void advance(int rank) {
    std::size_t& next = next_[static_cast<std::size_t>(rank)];
    const auto actions = schedule_.actions(rank);
    for (; next < actions.size(); ++next) {
      arrive(actions[next], rank);
      if (waits_for(actions[next], rank)) return;
      complete(actions[next]);
    }
  }

  void wake(int rank) {
    if (std::exchange(queued_[static_cast<std::size_t>(rank)], 1)) return;
    queue_.push_back(rank);
  }

  // Joins a collective, which the other ranks of the group can see before the action completes.
  void arrive(const Action& action, int rank) {
    if (action.computation != Computation::SumShared) return;
    const int group = graph().group_of(action.stage);
    if (std::exchange(joined(rank, group), 1)) return;
    for (const int member : graph().groups()[static_cast<std::size_t>(group)]) {
      if (rank_of(member) != rank) wake(rank_of(member));
    }
  }

  std::optional<Wait> waits_for(const Action& action, int rank) {
    if (action.is_send()) {
      const Action receive = counterpart(action);
      if (message_state(edge_of(action), action.microbatch) & message_bit(receive.computation)) return std::nullopt;
      return Wait{receive, rank_of(receive.stage)};
    }
    if (action.computation == Computation::SumShared) {
      const int group = graph().group_of(action.stage);
      for (const int member : graph().groups()[static_cast<std::size_t>(group)]) {
        if (!joined(rank_of(member), group)) return Wait{parameters(member, Computation::SumShared), rank_of(member)};
      }
      return std::nullopt;
    }
    if (action.is_overlap()) {
      auto first = input_of(action.first(), rank);
      return first ? first : input_of(action.second(), rank);
    }
    return action.is_compute() ? input_of(action, rank) : std::nullopt;
  }

  // Returns the first input from another rank that has not arrived.
  std::optional<Wait> input_of(const Action& part, int rank) {
    const bool forwards = is_forward(part);
    if (!forwards && !makes_input_gradient(part)) return std::nullopt;
    for (const int e : forwards ? graph().in_edges(part.stage) : graph().out_edges(part.stage)) {
      const int source = forwards ? edge(e).from : edge(e).to;
      if (rank_of(source) == rank) continue;
      const Computation send = forwards ? Computation::SendForward : Computation::SendBackward;
      if (expected_.communication) {
        if (message_state(e, part.microbatch) & message_bit(send)) continue;
        return Wait{message(source, send, part.microbatch, part.stage), rank_of(source)};
      }
      if (computed(source, part.microbatch) & (forwards ? kForwardBit : kInputBit | kFullBit)) continue;
      return Wait{forwards ? forward(source, part.microbatch) : input_backward(source, part.microbatch),
                  rank_of(source)};
    }
    return std::nullopt;
  }

  void complete(const Action& action) {
    if (action.is_message()) {
      message_state(edge_of(action), action.microbatch) |= message_bit(action.computation);
      wake(rank_of(action.other_stage));
    } else if (action.is_compute()) {
      for_each_part(action, [&](const Action& part) {
        computed(part.stage, part.microbatch) |= bit_of(part.computation);
        if (expected_.communication) return;
        for (const int e : graph().out_edges(part.stage)) wake(rank_of(edge(e).to));
        for (const int e : graph().in_edges(part.stage)) wake(rank_of(edge(e).from));
      });
    }
  }

  // Every blocked rank waits for a blocked rank, so following the waits from any of them ends in a cycle.
  [[noreturn]] void fail_deadlock(int rank) {
    std::vector<int> cycle;
    while (std::find(cycle.begin(), cycle.end(), rank) == cycle.end()) {
      cycle.push_back(rank);
      rank = waits_for(schedule_.actions(rank)[next_[static_cast<std::size_t>(rank)]], rank)->on_rank;
    }
    cycle.erase(cycle.begin(), std::find(cycle.begin(), cycle.end(), rank));
    std::string what = "deadlock, the ranks wait for each other in a cycle";
    what += expected_.communication ? " (a send waits until its receive is posted):" : ":";
    for (const int member : cycle) {
      const std::size_t position = next_[static_cast<std::size_t>(member)];
      const Action& action = schedule_.actions(member)[position];
      const Wait wait = *waits_for(action, member);
      what += concat("\n  rank ", member, ", ", place_text(schedule_, member, position), ": ", to_string(action),
                     " waits for ", wait_text(wait), " on rank ", wait.on_rank);
    }
    fail(cycle.front(), next_[static_cast<std::size_t>(cycle.front())], std::move(what));
  }

  // Returns the action that is waited for: for a gradient, the B or the I that computes it.
  std::string wait_text(const Wait& wait) const {
    const Action full = full_backward(wait.for_action.stage, wait.for_action.microbatch);
    if (wait.for_action.computation == Computation::InputBackward) {
      bool has_full = false;
      for (const Action& action : schedule_.actions(wait.on_rank)) {
        for_each_part(action, [&](const Action& part) { has_full |= part == full; });
      }
      if (has_full) return to_string(full);
    }
    return to_string(wait.for_action);
  }

  // Index of each rank's next action, and the ranks that may be able to continue.
  std::vector<std::size_t> next_;
  std::vector<int> queue_;
  std::vector<char> queued_;
};

}  // namespace

void check_deadlock(const Schedule& schedule, const Features& expected) {
  DeadlockChecker(schedule, expected).run();
}

}  // namespace penstock::internal
