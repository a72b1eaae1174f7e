// The first look: each rank's list by itself. A stage's actions all lie on one rank, so all that must come before an
// action on its own rank is known by then, and at the end all that is missing.
#include <algorithm>

#include "penstock/schedule/source.h"
#include "penstock/schedule/verify/tables.h"

namespace penstock::internal {
namespace {

std::string stage_and_microbatch(int stage, int microbatch) {
  return "stage " + std::to_string(stage) + ", microbatch " + std::to_string(microbatch);
}

class ListLook : VerifierTables {
 public:
  ListLook(const Schedule& schedule, const Features& expected) : VerifierTables(schedule, expected) {}

  void run() {
    require_enough_actions();
    clear();
    weight_gradients_.assign(static_cast<std::size_t>(schedule_.stages()), 0);
    gathered_.assign(static_cast<std::size_t>(schedule_.stages()), 0);
    reduced_.assign(static_cast<std::size_t>(schedule_.stages()), 0);
    for (int rank = 0; rank < schedule_.ranks(); ++rank) look_at(rank);
    for (int stage = 0; stage < schedule_.stages(); ++stage) require_complete(stage);
  }

 private:
  [[noreturn]] void fail_here(std::string what) const { fail(rank_, position_, std::move(what)); }
  // Something that should stand in a stage's list does not.
  [[noreturn]] void fail_missing(int stage, const std::string& what) const {
    const int rank = schedule_.placement().rank_of(stage);
    fail(rank, schedule_.actions(rank).size(), what);
  }

  // Before tables are made of stages × microbatches, which a hostile file can name at no cost.
  void require_enough_actions() const {
    std::size_t forwards = 0;
    for (int rank = 0; rank < schedule_.ranks(); ++rank) {
      for (const Action& action : schedule_.actions(rank)) {
        for_each_part(action, [&](const Action& part) { forwards += is_forward(part) ? 1 : 0; });
      }
    }
    if (forwards >= schedule_.cells()) return;
    // Some forward is missing; find the first without a table of all.
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
                 to_string(forward(wanted.first, wanted.second)) +
                     " is missing: " + stage_and_microbatch(wanted.first, wanted.second) + " has no forward.");
  }

  void look_at(int rank) {
    rank_ = rank;
    for (position_ = 0; position_ < schedule_.actions(rank).size(); ++position_) {
      const Action& action = schedule_.actions(rank)[position_];
      require_in_range(action);
      if (action.is_compute()) {
        for_each_part(action, [&](const Action& part) { look_at_compute(part); });
      } else if (action.is_message()) {
        look_at_message(action);
      } else {
        look_at_parameters(action);
      }
    }
  }

  void require_in_range(const Action& action) const {
    if (action.is_overlap() &&
        (action.first_part > Computation::FullBackward || action.second_part > Computation::FullBackward)) {
      fail_here("the parts of a pair are F, I, W or B.");
    }
    for_each_part(action, [&](const Action& part) {
      if (part.stage < 0 || part.stage >= schedule_.stages()) {
        fail_here("there is no stage " + std::to_string(part.stage) + "; the stages are 0 to " +
                  std::to_string(schedule_.stages() - 1) + ".");
      }
      if (rank_of(part.stage) != rank_) {
        fail_here("stage " + std::to_string(part.stage) + " lies on rank " + std::to_string(rank_of(part.stage)) + ".");
      }
      const bool takes_microbatch = part.is_compute() || part.is_message();
      if (takes_microbatch && (part.microbatch < 0 || part.microbatch >= schedule_.microbatches())) {
        fail_here("there is no microbatch " + std::to_string(part.microbatch) + "; the microbatches are 0 to " +
                  std::to_string(schedule_.microbatches() - 1) + ".");
      }
    });
  }

  void look_at_compute(const Action& part) {
    std::uint8_t& state = computed(part.stage, part.microbatch);
    const std::uint8_t bit = bit_of(part.computation);
    const auto text = [&] { return to_string(part); };
    if (state & bit) fail_here(text() + " is here a second time" + first_place_of(part) + ".");
    if (!is_forward(part) && !expected_.backward) fail_here(text() + " is a backward in a schedule of forwards alone.");
    if (expected_.sharding && !gathered_[static_cast<std::size_t>(part.stage)]) {
      fail_here(text() + " needs its stage's parameters, but stage " + std::to_string(part.stage) +
                " is sharded here.");
    }
    if (is_forward(part)) {
      for (const int e : graph().in_edges(part.stage))
        require_input(part, e, edge(e).from, kForwardBit, Computation::RecvForward);
    } else if (makes_input_gradient(part)) {
      if (!(state & kForwardBit))
        fail_here(text() + " comes before its forward " + to_string(forward(part.stage, part.microbatch)) + ".");
      if (state & (kInputBit | kFullBit)) {
        fail_here(text() + " is a second backward: a microbatch has B, or I and W" +
                  first_place_of(other_backward(part)) + ".");
      }
      for (const int e : graph().out_edges(part.stage)) {
        require_input(part, e, edge(e).to, kInputBit | kFullBit, Computation::RecvBackward);
      }
    } else {
      if (state & kFullBit) fail_here(text() + " is one too many: the full backward made that gradient already.");
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

  // What a computation takes from another stage: made before on this rank, or posted before as a receive.
  void require_input(const Action& part, int e, int source, std::uint8_t made, Computation receive) {
    if (!crosses(edge(e))) {
      if (!(computed(source, part.microbatch) & made)) {
        fail_here(to_string(part) + " comes before stage " + std::to_string(source) +
                  " of this rank has made its input.");
      }
    } else if (expected_.communication && !(message_state(e, part.microbatch) & message_bit(receive))) {
      fail_here(to_string(part) + " has no " + to_string(message(part.stage, receive, part.microbatch, source)) +
                " before it.");
    }
  }

  void look_at_message(const Action& action) {
    const bool forwards = action.carries_activation();
    if (!expected_.communication) fail_here("a message in a schedule without communication.");
    if (!forwards && !expected_.backward) fail_here("a gradient's message in a schedule of forwards alone.");
    const Edge along = edge_under(action);
    const int e = graph().edge_index(along.from, along.to);
    if (e < 0) {
      fail_here("no edge leads from stage " + std::to_string(along.from) + " to stage " + std::to_string(along.to) +
                ".\n  Hint: a skip connection is declared with --edges FROM-TO.");
    }
    if (!crosses(along))
      fail_here("stages " + std::to_string(along.from) + " and " + std::to_string(along.to) +
                " lie on one rank and need no message.");
    std::uint8_t& state = message_state(e, action.microbatch);
    const std::uint8_t bit = message_bit(action.computation);
    if (state & bit) fail_here(to_string(action) + " is here a second time" + first_place_of(action) + ".");
    if (action.is_send()) {
      const std::uint8_t made = forwards ? kForwardBit : kInputBit | kFullBit;
      if (!(computed(action.stage, action.microbatch) & made)) fail_here("it sends what has not been computed yet.");
    }
    state |= bit;
  }

  void look_at_parameters(const Action& action) {
    const auto stage = static_cast<std::size_t>(action.stage);
    const std::string name = "stage " + std::to_string(action.stage);
    switch (action.computation) {
      case Computation::Unshard:
        if (!expected_.sharding) fail_here("UNSHARD in a schedule without sharding.");
        if (std::exchange(gathered_[stage], 1)) fail_here(name + " is gathered already.");
        break;
      case Computation::Reshard:
        if (!expected_.sharding) fail_here("RESHARD in a schedule without sharding.");
        if (!std::exchange(gathered_[stage], 0)) fail_here(name + " is not gathered here.");
        break;
      case Computation::ReduceGrad:
        if (!expected_.reduction) fail_here("REDUCE_GRAD in a schedule without reductions.");
        if (std::exchange(reduced_[stage], 1))
          fail_here(name + "'s gradients are reduced already" + first_place_of(action) + ".");
        require_all_weight_gradients(action.stage);
        break;
      default: look_at_sum(action.stage); break;
    }
  }

  void require_all_weight_gradients(int stage) const {
    const int made = weight_gradients_[static_cast<std::size_t>(stage)];
    if (made == schedule_.microbatches()) return;
    fail_here("only " + std::to_string(made) + " of stage " + std::to_string(stage) + "'s " +
              std::to_string(schedule_.microbatches()) + " weight gradients have been made here.");
  }

  void look_at_sum(int stage) {
    if (!expected_.shared_sums) fail_here("SUM_SHARED in a schedule without sums of shared parameters.");
    const int group = graph().group_of(stage);
    if (group < 0) {
      fail_here("stage " + std::to_string(stage) +
                " shares no parameters.\n  Hint: stages that share parameters are declared with --shared 0,3.");
    }
    if (std::exchange(joined(rank_, group), 1)) fail_here("the rank has joined that group's sum already.");
    for (const int member : graph().groups()[static_cast<std::size_t>(group)]) {
      if (rank_of(member) != rank_) continue;
      require_all_weight_gradients(member);
      if (expected_.reduction && !reduced_[static_cast<std::size_t>(member)]) {
        fail_here("stage " + std::to_string(member) + "'s gradients are not reduced yet.");
      }
    }
  }

  // Returns ", first at position 3", for a message about a second time; in a message only, so it may search.
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
          fail_missing(stage, to_string(action) + " is missing: " + stage_and_microbatch(stage, mb) + " has no " +
                                  std::string(describe(action.computation)) + ".");
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
    if (gathered_[static_cast<std::size_t>(stage)])
      fail_missing(stage, "stage " + std::to_string(stage) + " is gathered and never resharded.");
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
        fail_missing(action.stage, to_string(action) + " is missing: its other end is " +
                                       to_string(counterpart(action)) + " on rank " +
                                       std::to_string(rank_of(action.other_stage)) + ".");
      };
      require(message(from, Computation::SendForward, mb, to));
      require(message(to, Computation::RecvForward, mb, from));
      if (expected_.backward) {
        require(message(to, Computation::SendBackward, mb, from));
        require(message(from, Computation::RecvBackward, mb, to));
      }
    }
  }

  // Where the look is.
  int rank_ = 0;
  std::size_t position_ = 0;

  // By stage.
  std::vector<int> weight_gradients_;
  std::vector<char> gathered_;
  std::vector<char> reduced_;
};

}  // namespace

void look_at_lists(const Schedule& schedule, const Features& expected) {
  ListLook(schedule, expected).run();
}

}  // namespace penstock::internal
