// Tables that both passes of the verifier fill: the computations, messages and collectives they have seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/verify.h"

namespace penstock::internal {

// Thrown by the checks, and caught by verify().
struct ViolationFound {
  Violation violation;
};

// Bits of the table of computations, which has an entry for each stage and microbatch.
enum ComputeBit : std::uint8_t { kForwardBit = 1, kInputBit = 2, kWeightBit = 4, kFullBit = 8, kRecomputeBit = 16 };

// Returns the bit of F, I, W, B or R.
inline std::uint8_t bit_of(Computation computation) {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(computation));
}
static_assert(static_cast<int>(Computation::Forward) == 0 && static_cast<int>(Computation::Recompute) == 4);

// Returns the bit of a SEND or RECV in the table of messages, which has an entry for each edge and microbatch.
inline std::uint8_t message_bit(Computation computation) {
  return static_cast<std::uint8_t>(
      1U << (static_cast<unsigned>(computation) - static_cast<unsigned>(Computation::SendForward)));
}

class VerifierTables {
 protected:
  VerifierTables(const Schedule& schedule, const Features& expected) : schedule_(schedule), expected_(expected) {}

  // Resets the tables: nothing has been seen yet.
  void clear() {
    computed_.assign(schedule_.cells(), 0);
    messages_.assign(graph().edges().size() * static_cast<std::size_t>(schedule_.microbatches()), 0);
    joined_.assign(static_cast<std::size_t>(schedule_.ranks()) * graph().groups().size(), 0);
  }

  [[noreturn]] static void fail(int rank, std::size_t position, std::string what) {
    throw ViolationFound{{rank, static_cast<int>(position), std::move(what)}};
  }

  const StageGraph& graph() const { return schedule_.graph(); }
  const Edge& edge(int index) const { return graph().edges()[static_cast<std::size_t>(index)]; }
  int rank_of(int stage) const { return schedule_.placement().rank_of(stage); }
  bool crosses(const Edge& edge) const { return rank_of(edge.from) != rank_of(edge.to); }

  std::uint8_t& computed(int stage, int microbatch) { return computed_[schedule_.cell(stage, microbatch)]; }
  std::uint8_t& message_state(int edge, int microbatch) {
    return messages_[static_cast<std::size_t>(edge) * static_cast<std::size_t>(schedule_.microbatches()) +
                     static_cast<std::size_t>(microbatch)];
  }
  char& joined(int rank, int group) {
    return joined_[static_cast<std::size_t>(rank) * graph().groups().size() + static_cast<std::size_t>(group)];
  }

  int edge_of(const Action& message) const {
    const Edge along = edge_under(message);
    return graph().edge_index(along.from, along.to);
  }

  const Schedule& schedule_;
  const Features expected_;

 private:
  // Tables by stage and microbatch, by edge and microbatch, and by rank and group.
  std::vector<std::uint8_t> computed_;
  std::vector<std::uint8_t> messages_;
  std::vector<char> joined_;
};

// Checks each rank's actions by themselves. Throws ViolationFound.
void check_lists(const Schedule& schedule, const Features& expected);
// Checks for deadlocks between ranks, in a schedule that check_lists has accepted. Throws ViolationFound.
void check_deadlock(const Schedule& schedule, const Features& expected);

}  // namespace penstock::internal
