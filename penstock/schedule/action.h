// An Action is one step of one rank: a computation of a stage on a microbatch, a message, or a change of a stage's
// parameters. It is a small value with a text of its own, the one that torch.distributed.pipelining prints and reads:
//
//   0F1  2I3  2W3  2B3             forward; input, weight and full backward of a stage and a microbatch
//   1SEND_F0  2RECV_F0             an activation leaves stage 1 for stage 2, and arrives there
//   2SEND_B0  1RECV_B0             a gradient, the other way
//   1SEND_F0@3  3RECV_F0@1         the same along an edge off the chain, which names its other end
//   0UNSHARD  0RESHARD             gather and free a stage's sharded parameters
//   0REDUCE_GRAD  0SUM_SHARED      reduce gradients over replicas; sum those of parameters that stages share
//   (0F1;3B0)OVERLAP_F_B           a pair: its parts run in turn, each releasing what waits for it at its own end
//
//   Action action = parse_action("2B3");
//   action.stage == 2 && action.computation == Computation::FullBackward && action.microbatch == 3;
//   to_string(forward(0, 1)) == "0F1";
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace penstock {

enum class Computation : std::uint8_t {
  Forward,
  InputBackward,
  WeightBackward,
  FullBackward,
  Unshard,
  Reshard,
  ReduceGrad,
  SumShared,
  SendForward,
  RecvForward,
  SendBackward,
  RecvBackward,
  Overlap,
};

// How a computation stands in an action's text: "F", "SEND_B", "OVERLAP_F_B".
std::string_view name_of(Computation computation);
// What it is in words: "forward", "send of a gradient".
std::string_view describe(Computation computation);
// All of them but Overlap, in the order of the enumeration.
std::span<const Computation> plain_computations();

// No microbatch, or no other stage.
inline constexpr std::int32_t kNone = -1;

struct Action {
  std::int32_t stage = 0;
  std::int32_t microbatch = kNone;
  // The stage at the other end of a message; of a pair, the second part's stage.
  std::int32_t other_stage = kNone;
  // Of a pair, the second part's microbatch.
  std::int32_t other_microbatch = kNone;
  Computation computation = Computation::Forward;
  // Of a pair, what its parts compute.
  Computation first_part = Computation::Forward;
  Computation second_part = Computation::Forward;

  // F, I, W, B, or a pair of them.
  bool is_compute() const { return computation <= Computation::FullBackward || computation == Computation::Overlap; }
  bool is_send() const { return computation == Computation::SendForward || computation == Computation::SendBackward; }
  bool is_recv() const { return computation == Computation::RecvForward || computation == Computation::RecvBackward; }
  bool is_message() const { return is_send() || is_recv(); }
  // Of a message: whether it carries an activation along its edge, or a gradient against it.
  bool carries_activation() const {
    return computation == Computation::SendForward || computation == Computation::RecvForward;
  }
  bool is_overlap() const { return computation == Computation::Overlap; }

  // The parts of a pair, as actions of their own.
  Action first() const { return {.stage = stage, .microbatch = microbatch, .computation = first_part}; }
  Action second() const { return {.stage = other_stage, .microbatch = other_microbatch, .computation = second_part}; }

  friend bool operator==(const Action&, const Action&) = default;
};

// Calls visit(part) for both parts of a pair in turn, and visit(action) for any other action.
template <class Visit>
void for_each_part(const Action& action, Visit&& visit) {
  if (action.is_overlap()) {
    visit(action.first());
    visit(action.second());
  } else {
    visit(action);
  }
}

inline bool is_forward(const Action& part) {
  return part.computation == Computation::Forward;
}
// I or B: what makes the gradients of a stage's inputs.
inline bool makes_input_gradient(const Action& part) {
  return part.computation == Computation::InputBackward || part.computation == Computation::FullBackward;
}
// W or B: what makes the gradients of a stage's parameters, and ends the life of its activations.
inline bool makes_weight_gradient(const Action& part) {
  return part.computation == Computation::WeightBackward || part.computation == Computation::FullBackward;
}

inline Action compute(int stage, Computation computation, int microbatch) {
  return {.stage = stage, .microbatch = microbatch, .computation = computation};
}
inline Action forward(int stage, int microbatch) {
  return compute(stage, Computation::Forward, microbatch);
}
inline Action input_backward(int stage, int microbatch) {
  return compute(stage, Computation::InputBackward, microbatch);
}
inline Action weight_backward(int stage, int microbatch) {
  return compute(stage, Computation::WeightBackward, microbatch);
}
inline Action full_backward(int stage, int microbatch) {
  return compute(stage, Computation::FullBackward, microbatch);
}
// Two computations as a pair; neither may be a pair itself.
inline Action overlap(const Action& first, const Action& second) {
  return {first.stage,          first.microbatch,  second.stage,      second.microbatch,
          Computation::Overlap, first.computation, second.computation};
}
// A message of a microbatch between a stage and another, seen from `stage`.
inline Action message(int stage, Computation computation, int microbatch, int other_stage) {
  return {.stage = stage, .microbatch = microbatch, .other_stage = other_stage, .computation = computation};
}
// UNSHARD, RESHARD, REDUCE_GRAD or SUM_SHARED of a stage.
inline Action parameters(int stage, Computation computation) {
  return {.stage = stage, .computation = computation};
}

// The same message as its other end names it.
Action counterpart(const Action& action);

std::string to_string(const Action& action);
// Appends the text to `out`; what CSV files and drawings of a million actions use.
void append_text(std::string& out, const Action& action);

// The action that `text` says, white space around it aside. Throws ScheduleError when it says none.
Action parse_action(std::string_view text);

}  // namespace penstock
