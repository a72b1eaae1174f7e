// An Action is one entry of a rank's schedule: a computation of a stage on a microbatch, a message, or an operation on
// a stage's parameters. It is a small value type. Its text is the one that torch.distributed.pipelining prints and
// reads:
//
//   0F1  2I3  2W3  2B3             forward; input, weight and full backward of a stage and a microbatch
//   2R3                            recomputation of a forward, which saved the inputs of its stage only
//   1SEND_F0  2RECV_F0             stage 1 sends an activation to stage 2, and stage 2 receives it
//   2SEND_B0  1RECV_B0             stage 2 sends a gradient back, and stage 1 receives it
//   1SEND_F0@3  3RECV_F0@1         the same along a skip connection: @ names the stage at the other end
//   0UNSHARD  0RESHARD             gather and free a stage's sharded parameters
//   0REDUCE_GRAD  0SUM_SHARED      reduce gradients over replicas; sum those of parameters that stages share
//   (0F1;3B0)OVERLAP_F_B           an overlapped pair: its parts run in turn, and each part's output can be sent when
//                                  that part ends
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

// The operation of an action. "Computation" is PyTorch's name for all of them, messages included.
enum class Computation : std::uint8_t {
  Forward,
  InputBackward,
  WeightBackward,
  FullBackward,
  Recompute,
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

// Returns the name of a computation in an action's text: "F", "SEND_B", "OVERLAP_F_B".
std::string_view name_of(Computation computation);
// Returns a description for messages and legends: "forward", "send of a gradient".
std::string_view describe(Computation computation);
// Returns all computations but Overlap, in the order of the enumeration.
std::span<const Computation> plain_computations();

// Value of Action::microbatch and Action::other_stage for actions that have none.
inline constexpr std::int32_t kNone = -1;

struct Action {
  std::int32_t stage = 0;
  std::int32_t microbatch = kNone;
  // Stage at the other end of a message, or stage of a pair's second part.
  std::int32_t other_stage = kNone;
  // Microbatch of a pair's second part.
  std::int32_t other_microbatch = kNone;
  Computation computation = Computation::Forward;
  // Computations of a pair's parts.
  Computation first_part = Computation::Forward;
  Computation second_part = Computation::Forward;

  // Returns true for F, I, W, B, a pair of them, and R.
  bool is_compute() const { return computation <= Computation::Recompute || computation == Computation::Overlap; }
  bool is_send() const { return computation == Computation::SendForward || computation == Computation::SendBackward; }
  bool is_recv() const { return computation == Computation::RecvForward || computation == Computation::RecvBackward; }
  bool is_message() const { return is_send() || is_recv(); }
  // Returns true for a message that carries an activation along its edge, false for one that carries a gradient back.
  bool carries_activation() const {
    return computation == Computation::SendForward || computation == Computation::RecvForward;
  }
  bool is_overlap() const { return computation == Computation::Overlap; }

  // Return the parts of a pair as separate actions.
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
// Returns true for I and B, which compute the gradients of a stage's inputs.
inline bool makes_input_gradient(const Action& part) {
  return part.computation == Computation::InputBackward || part.computation == Computation::FullBackward;
}
// Returns true for W and B, which compute the gradients of a stage's parameters and free its saved activations.
inline bool makes_weight_gradient(const Action& part) {
  return part.computation == Computation::WeightBackward || part.computation == Computation::FullBackward;
}

// Return actions of each kind.
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
inline Action recomputation(int stage, int microbatch) {
  return compute(stage, Computation::Recompute, microbatch);
}
// Returns an overlapped pair of two computations, each of which is F, I, W or B.
inline Action overlap(const Action& first, const Action& second) {
  return {first.stage,          first.microbatch,  second.stage,      second.microbatch,
          Computation::Overlap, first.computation, second.computation};
}
// Returns the end of a message that belongs to `stage`; `other_stage` is at the other end.
inline Action message(int stage, Computation computation, int microbatch, int other_stage) {
  return {.stage = stage, .microbatch = microbatch, .other_stage = other_stage, .computation = computation};
}
// Returns an UNSHARD, RESHARD, REDUCE_GRAD or SUM_SHARED of a stage.
inline Action parameters(int stage, Computation computation) {
  return {.stage = stage, .computation = computation};
}

// Returns the other end of a message: the RECV of a SEND, and the SEND of a RECV.
Action counterpart(const Action& action);

std::string to_string(const Action& action);
// Appends the text to `out` without allocating a string for each action.
void append_text(std::string& out, const Action& action);

// Parses an action; white space around it is ignored. Throws ScheduleError if the text is not an action.
Action parse_action(std::string_view text);

}  // namespace penstock
