// What both looks of the verifier keep: which computations, messages and meetings they have come across.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/verify.h"

namespace penstock::internal {

// Thrown inside the verifier only, to leave nested checks.
struct Found {
  Violation violation;
};

// What has been seen of a stage and a microbatch, and of a message, as bits.
enum ComputeBit : std::uint8_t { kForwardBit = 1, kInputBit = 2, kWeightBit = 4, kFullBit = 8 };

inline std::uint8_t bit_of(Computation computation) {
  return static_cast<std::uint8_t>(1U << static_cast<unsigned>(computation));
}
static_assert(static_cast<int>(Computation::Forward) == 0 && static_cast<int>(Computation::FullBackward) == 3);

inline std::uint8_t message_bit(Computation computation) {
  return static_cast<std::uint8_t>(
      1U << (static_cast<unsigned>(computation) - static_cast<unsigned>(Computation::SendForward)));
}

class VerifierTables {
 protected:
  VerifierTables(const Schedule& schedule, const Features& expected) : schedule_(schedule), expected_(expected) {}

  // Nothing seen yet.
  void clear() {
    computed_.assign(schedule_.cells(), 0);
    messages_.assign(graph().edges().size() * static_cast<std::size_t>(schedule_.microbatches()), 0);
    joined_.assign(static_cast<std::size_t>(schedule_.ranks()) * graph().groups().size(), 0);
  }

  [[noreturn]] static void fail(int rank, std::size_t position, std::string what) {
    throw Found{{rank, static_cast<int>(position), std::move(what)}};
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
  // By stage and microbatch; by edge and microbatch; by rank and group.
  std::vector<std::uint8_t> computed_;
  std::vector<std::uint8_t> messages_;
  std::vector<char> joined_;
};

// The first look: throws Found.
void look_at_lists(const Schedule& schedule, const Features& expected);
// The second, of lists that the first has accepted: throws Found.
void run_lists(const Schedule& schedule, const Features& expected);

}  // namespace penstock::internal
