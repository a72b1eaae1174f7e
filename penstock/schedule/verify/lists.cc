// The first pass of the verifier checks each rank's actions by themselves. All actions of a stage are on one rank, so
// the order on that rank, and completeness, can be checked without the other ranks.
#include <algorithm>

#include "penstock/base/text.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify/tables.h"

namespace penstock::internal {
namespace {

std::string stage_and_microbatch(int stage, int microbatch) {
  return concat("stage ", stage, ", microbatch ", microbatch);
}

class ListChecker : VerifierTables {
 public:
  ListChecker(const Schedule& schedule, const Features& expected) : VerifierTables(schedule, expected) {}

  void run() {
    require_enough_actions();
    clear();
    weight_gradients_.assign(static_cast<std::size_t>(schedule_.stages()), 0);
    unsharded_.assign(static_cast<std::size_t>(schedule_.stages()), 0);
    reduced_.assign(static_cast<std::size_t>(schedule_.stages()), 0);
    for (int rank = 0; rank < schedule_.ranks(); ++rank) check_rank(rank);
    for (int stage = 0; stage < schedule_.stages(); ++stage) require_complete(stage);
  }

 private:
  [[noreturn]] void fail_here(std::string what) const { fail(rank_, position_, std::move(what)); }
  // Reports an action of a stage that is missing.
  [[noreturn]] void fail_missing(int stage, const std::string& what) const {
    const int rank = schedule_.placement().rank_of(stage);
    fail(rank, schedule_.actions(rank).size(), what);
  }

  // Runs before tables of stages × microbatches are allocated, whose size a hostile file can choose.
  void require_enough_actions() const {
    std::size_t forwards = 0;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      for (const Action& action : schedule_.actions(rank)) {
        for_each_part(action, [&](const Action& part) { forwards += is_forward(part) ? 1 : 0; });
      }
    }
    if (forwards >= schedule_.cells()) return;
    // A forward is missing. Find the first one without a table of all.
    std::vector<std::pair<int, int>> present;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      for (const Action& action : schedule_.actions(rank)) {
        for_each_part(action, [&](const Action& part) {
          if (is_forward(part)) present.emplace_back(part.stage, part.microbatch);
        });
      }
    }
    std::sort(present.begin(), present.end());
    std::pair<int, int> wanted{0, 0};
    for (const auto& found : present) {
      if (found < wanted) continue;
      if (found != wanted) break;
      if (++wanted.second == schedule_.microbatches()) wanted = {wanted.first + 1, 0};
    }
    fail_missing(std::min(wanted.first, schedule_.stages() - 1),
                 concat(to_string(forward(wanted.first, wanted.second)),
                        " is missing: ", stage_and_microbatch(wanted.first, wanted.second), " has no forward."));
  }

  void check_rank(int rank) {
    rank_ = rank;
    for (position_ = 0; position_ < schedule_.actions(rank).size(); ++position_) {
      const Action& action = schedule_.actions(rank)[position_];
      require_in_range(action);
      if (action.is_compute()) {
        for_each_part(action, [&](const Action& part) { check_compute(part); });
      } else if (action.is_message()) {
        check_message(action);
      } else {
        check_parameters(action);
      }
    }
  }

  void require_in_range(const Action& action) const {
    if (action.is_overlap() &&
        (action.first_part > Computation::FullBackward || action.second_part > Computation::FullBackward)) {
      fail_here("the parts of a pair must be F, I, W or B.");
    }
    for_each_part(action, [&](const Action& part) {
      if (part.stage < 0 || part.stage >= schedule_.stages()) {
        fail_here(concat("there is no stage ", part.stage, "; the stages are 0 to ", schedule_.stages() - 1, "."));
      }
      if (rank_of(part.stage) != rank_) {
        fail_here(concat("stage ", part.stage, " is placed on rank ", rank_of(part.stage), "."));
      }
      const bool takes_microbatch = part.is_compute() || part.is_message();
      if (takes_microbatch && (part.microbatch < 0 || part.microbatch >= schedule_.microbatches())) {
        fail_here(concat("there is no microbatch ", part.microbatch, "; the microbatches are 0 to ",
                         schedule_.microbatches() - 1, "."));
      }
    });
  }

  void check_compute(const Action& part) {
    std::uint8_t& state = computed(part.stage, part.microbatch);
    const std::uint8_t bit = bit_of(part.computation);
    const auto text = [&] { return to_string(part); };
    if (state & bit) fail_here(concat(text(), " is a duplicate", first_place_of(part), "."));
    if (!is_forward(part) && !expected_.backward) {
      fail_here(concat(text(), " is a ", describe(part.computation), " in a schedule of forwards only."));
    }
    if (expected_.sharding && !unsharded_[static_cast<std::size_t>(part.stage)]) {
      fail_here(concat(text(), " needs its stage's parameters, but stage ", part.stage, " is sharded here."));
    }
    if (is_forward(part)) {
      for (const int e : graph().in_edges(part.stage))
        require_input(part, e, edge(e).from, kForwardBit, Computation::RecvForward);
    } else if (makes_input_gradient(part)) {
      if (!(state & kForwardBit))
        fail_here(text() + " comes before its forward " + to_string(forward(part.stage, part.microbatch)) + ".");
      if (state & (kInputBit | kFullBit)) {
        fail_here(concat(text(), " is a second backward: a microbatch has either B, or I and W",
                         first_place_of(other_backward(part)), "."));
      }
      for (const int e : graph().out_edges(part.stage)) {
        require_input(part, e, edge(e).to, kInputBit | kFullBit, Computation::RecvBackward);
      }
    } else if (part.computation == Computation::Recompute) {
      if (!(state & kForwardBit))
        fail_here(text() + " comes before its forward " + to_string(forward(part.stage, part.microbatch)) + ".");
      if (state & (kInputBit | kFullBit)) {
        fail_here(text() + " comes after the backward of its microbatch, which needs what it recomputes.");
      }
    } else {
      if (state & kFullBit)
        fail_here(text() + " is redundant: the full backward has already computed the weight gradient.");
      if (!(state & kInputBit))
        fail_here(text() + " comes before its input backward " +
                  to_string(input_backward(part.stage, part.microbatch)) + ".");
    }
    state |= bit;
    if (makes_weight_gradient(part)) ++weight_gradients_[static_cast<std::size_t>(part.stage)];
  }

  static Action other_backward(const Action& part) {
    return part.computation == Computation::FullBackward ? input_backward(part.stage, part.microbatch)
                                                         : full_backward(part.stage, part.microbatch);
  }

  // Requires that an input from another stage was computed before on this rank, or that its receive was posted before.
  void require_input(const Action& part, int e, int source, std::uint8_t made, Computation receive) {
    if (!crosses(edge(e))) {
      if (!(computed(source, part.microbatch) & made)) {
        fail_here(concat(to_string(part), " comes before stage ", source, " of this rank has computed its input."));
      }
    } else if (expected_.communication && !(message_state(e, part.microbatch) & message_bit(receive))) {
      fail_here(concat(to_string(part), " has no ", to_string(message(part.stage, receive, part.microbatch, source)),
                       " before it."));
    }
  }

  void check_message(const Action& action) {
    const bool forwards = action.carries_activation();
    if (!expected_.communication) fail_here("a message in a schedule without communication.");
    if (!forwards && !expected_.backward) fail_here("a message with a gradient in a schedule of forwards only.");
    const Edge along = edge_under(action);
    const int e = graph().edge_index(along.from, along.to);
    if (e < 0) {
      fail_here(concat("the stage graph has no edge from stage ", along.from, " to stage ", along.to,
                       ".\n  Hint: declare the skip connection as an edge of the stage graph."));
    }
    if (!crosses(along))
      fail_here(concat("stages ", along.from, " and ", along.to, " are on the same rank and need no message."));
    std::uint8_t& state = message_state(e, action.microbatch);
    const std::uint8_t bit = message_bit(action.computation);
    if (state & bit) fail_here(concat(to_string(action), " is a duplicate", first_place_of(action), "."));
    if (action.is_send()) {
      const std::uint8_t made = forwards ? kForwardBit : kInputBit | kFullBit;
      if (!(computed(action.stage, action.microbatch) & made))
        fail_here("it sends a value that has not been computed yet.");
    }
    state |= bit;
  }

  void check_parameters(const Action& action) {
    const auto stage = static_cast<std::size_t>(action.stage);
    const std::string name = concat("stage ", action.stage);
    switch (action.computation) {
      case Computation::Unshard:
        if (!expected_.sharding) fail_here("UNSHARD in a schedule without sharding.");
        if (std::exchange(unsharded_[stage], 1)) fail_here(name + " is already unsharded.");
        break;
      case Computation::Reshard:
        if (!expected_.sharding) fail_here("RESHARD in a schedule without sharding.");
        if (!std::exchange(unsharded_[stage], 0)) fail_here(name + " is already sharded.");
        break;
      case Computation::ReduceGrad:
        if (!expected_.reduction) fail_here("REDUCE_GRAD in a schedule without reductions.");
        if (std::exchange(reduced_[stage], 1))
          fail_here(concat(name, "'s gradients have already been reduced", first_place_of(action), "."));
        require_all_weight_gradients(action.stage);
        break;
      default: check_sum(action.stage); break;
    }
  }

  void require_all_weight_gradients(int stage) const {
    const int made = weight_gradients_[static_cast<std::size_t>(stage)];
    if (made == schedule_.microbatches()) return;
    fail_here(concat("only ", made, " of stage ", stage, "'s ", schedule_.microbatches(),
                     " weight gradients have been computed here."));
  }

  void check_sum(int stage) {
    if (!expected_.shared_sums) fail_here("SUM_SHARED in a schedule without sums of shared parameters.");
    const int group = graph().group_of(stage);
    if (group < 0) {
      fail_here(concat("stage ", stage,
                       " shares no parameters.\n  Hint: declare the stages that share parameters as a group "
                       "of the stage graph."));
    }
    if (std::exchange(joined(rank_, group), 1)) fail_here("the rank has already joined the sum of that group.");
    for (const int member : graph().groups()[static_cast<std::size_t>(group)]) {
      if (rank_of(member) != rank_) continue;
      require_all_weight_gradients(member);
      if (expected_.reduction && !reduced_[static_cast<std::size_t>(member)]) {
        fail_here(concat("stage ", member, "'s gradients have not been reduced yet."));
      }
    }
  }

  // Returns ", first at position 3" for a message about a duplicate. A linear search, as it runs only on failure.
  std::string first_place_of(const Action& wanted) const {
    const auto actions = schedule_.actions(rank_);
    for (std::size_t i = 0; i < position_; ++i) {
      bool found = false;
      for_each_part(actions[i], [&](const Action& part) { found |= part == wanted; });
      if (found) return ", first at " + place_text(schedule_, rank_, i);
    }
    return "";
  }

  void require_complete(int stage) {
    for (int mb = 0; mb < schedule_.microbatches(); ++mb) {
      const std::uint8_t state = computed(stage, mb);
      const auto require = [&](bool present, const Action& action) {
        if (!present)
          fail_missing(stage, concat(to_string(action), " is missing: ", stage_and_microbatch(stage, mb), " has no ",
                                     describe(action.computation), "."));
      };
      require(state & kForwardBit, forward(stage, mb));
      if (expected_.backward) {
        if (state & kInputBit) {
          require(state & kWeightBit, weight_backward(stage, mb));
        } else {
          require(state & kFullBit, full_backward(stage, mb));
        }
      }
    }
    if (expected_.communication) {
      for (const int e : graph().in_edges(stage)) require_messages(e);
    }
    if (unsharded_[static_cast<std::size_t>(stage)])
      fail_missing(stage, concat("stage ", stage, " is unsharded and never resharded."));
    if (expected_.reduction && !reduced_[static_cast<std::size_t>(stage)]) {
      fail_missing(stage, to_string(parameters(stage, Computation::ReduceGrad)) +
                              " is missing: the stage's gradients are never reduced.");
    }
    const int group = graph().group_of(stage);
    if (expected_.shared_sums && group >= 0 && !joined(rank_of(stage), group)) {
      fail_missing(stage, to_string(parameters(stage, Computation::SumShared)) +
                              " is missing: the rank never joins the sum of its shared parameters.");
    }
  }

  void require_messages(int e) {
    if (!crosses(edge(e))) return;
    const auto [from, to] = edge(e);
    for (int mb = 0; mb < schedule_.microbatches(); ++mb) {
      const std::uint8_t state = message_state(e, mb);
      const auto require = [&](const Action& action) {
        if (state & message_bit(action.computation)) return;
        fail_missing(action.stage,
                     concat(to_string(action), " is missing: its other end is ", to_string(counterpart(action)),
                            " on rank ", rank_of(action.other_stage), "."));
      };
      require(message(from, Computation::SendForward, mb, to));
      require(message(to, Computation::RecvForward, mb, from));
      if (expected_.backward) {
        require(message(to, Computation::SendBackward, mb, from));
        require(message(from, Computation::RecvBackward, mb, to));
      }
    }
  }

  // Position of the action that is being checked.
  int rank_ = 0;
  std::size_t position_ = 0;

  // State by stage.
  std::vector<int> weight_gradients_;
  std::vector<char> unsharded_;
  std::vector<char> reduced_;
};

}  // namespace

void check_lists(const Schedule& schedule, const Features& expected) {
  ListChecker(schedule, expected).run();
}

}  // namespace penstock::internal
