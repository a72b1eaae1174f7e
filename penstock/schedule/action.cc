#include "penstock/schedule/action.h"

#include <array>
#include <cctype>
#include <charconv>

#include "penstock/schedule/error.h"

namespace penstock {
namespace {

struct ComputationInfo {
  std::string_view name;
  std::string_view description;
  bool takes_microbatch;
};

// In the order of the enumeration.
constexpr std::array kComputations = {
    ComputationInfo{"F", "forward", true},
    ComputationInfo{"I", "input backward", true},
    ComputationInfo{"W", "weight backward", true},
    ComputationInfo{"B", "full backward", true},
    ComputationInfo{"R", "recomputation", true},
    ComputationInfo{"UNSHARD", "gathering of sharded parameters", false},
    ComputationInfo{"RESHARD", "freeing of gathered parameters", false},
    ComputationInfo{"REDUCE_GRAD", "reduction of gradients over replicas", false},
    ComputationInfo{"SUM_SHARED", "sum of the gradients of shared parameters", false},
    ComputationInfo{"SEND_F", "send of an activation", true},
    ComputationInfo{"RECV_F", "receive of an activation", true},
    ComputationInfo{"SEND_B", "send of a gradient", true},
    ComputationInfo{"RECV_B", "receive of a gradient", true},
    ComputationInfo{"OVERLAP_F_B", "overlapped pair", false},
};

const ComputationInfo& info_of(Computation computation) {
  return kComputations[static_cast<std::size_t>(computation)];
}

// Returns the stage at the other end of a message along the chain: activations go to the next stage, gradients to the
// previous one. The result may be out of range.
std::int64_t chain_neighbour(std::int64_t stage, Computation computation) {
  const bool later = computation == Computation::SendForward || computation == Computation::RecvBackward;
  return later ? stage + 1 : stage - 1;
}

void append_number(std::string& out, int number) {
  std::array<char, 16> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), number);
  out.append(digits.data(), result.ptr);
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// Quotes a text for an error message; the text may be long or binary.
std::string quoted(std::string_view text) {
  constexpr std::size_t kMost = 60;
  std::string out = "'";
  for (const char c : text.substr(0, kMost)) out += (c >= ' ' && c <= '~') ? c : '?';
  return out + (text.size() > kMost ? "…'" : "'");
}

// Recursive-descent parser for the text of one action; errors quote `whole`.
class ActionParser {
 public:
  explicit ActionParser(std::string_view whole) : whole_(whole), rest_(whole) {}

  Action action() {
    const Action result = rest_.starts_with('(') ? pair() : plain();
    if (!rest_.empty()) fail("unexpected " + quoted(rest_) + " at its end.");
    return result;
  }

 private:
  [[noreturn]] void fail(const std::string& reason) const {
    throw ScheduleError(quoted(whole_) + " is not an action: " + reason);
  }

  Action pair() {
    rest_.remove_prefix(1);
    const Action first = part(';');
    const Action second = part(')');
    if (!take(info_of(Computation::Overlap).name)) {
      fail("OVERLAP_F_B must follow the parts of a pair.\n  Hint: write (0F1;3B0)OVERLAP_F_B.");
    }
    return overlap(first, second);
  }

  Action part(char end) {
    if (rest_.starts_with('(')) fail("the parts of a pair cannot be pairs.");
    const Action result = plain();
    const bool may_pair = result.is_compute() && result.computation != Computation::Recompute;
    if (!may_pair) fail("the parts of a pair must be F, I, W or B, not " + quoted(to_string(result)) + ".");
    if (!take({&end, 1})) fail("a pair has exactly two parts.\n  Hint: write (0F1;3B0)OVERLAP_F_B.");
    return result;
  }

  Action plain() {
    Action result;
    result.stage = number("it must begin with the index of a stage.\n  Hint: 0F1 is stage 0, forward, microbatch 1.");
    result.computation = computation();
    if (info_of(result.computation).takes_microbatch) {
      result.microbatch = number(std::string(name_of(result.computation)) + " must be followed by a microbatch.");
    }
    if (result.is_message()) {
      result.other_stage = take("@") ? number("'@' must be followed by the stage at the other end.")
                                     : static_cast<int>(chain_neighbour(result.stage, result.computation));
    }
    return result;
  }

  Computation computation() {
    std::size_t length = 0;
    while (length < rest_.size() && (std::isalpha(static_cast<unsigned char>(rest_[length])) || rest_[length] == '_')) {
      ++length;
    }
    const std::string_view word = rest_.substr(0, length);
    if (word == info_of(Computation::Overlap).name) fail("OVERLAP_F_B must follow a pair: (0F1;3B0)OVERLAP_F_B.");
    for (const Computation candidate : plain_computations()) {
      if (word == name_of(candidate)) {
        rest_.remove_prefix(length);
        return candidate;
      }
    }
    std::string hint = "\n  Hint: the computations are ";
    for (const Computation candidate : plain_computations()) {
      hint += std::string(name_of(candidate)) + (candidate == plain_computations().back() ? "." : ", ");
    }
    fail((word.empty() ? std::string("no computation after the stage.") : "unknown computation " + quoted(word) + ".") +
         hint);
  }

  int number(const std::string& if_missing) {
    int value = 0;
    const auto result = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (result.ec == std::errc::result_out_of_range) fail("a number in it is too large.");
    if (result.ec != std::errc() || rest_.front() == '-') fail(if_missing);
    rest_.remove_prefix(static_cast<std::size_t>(result.ptr - rest_.data()));
    return value;
  }

  bool take(std::string_view expected) {
    if (!rest_.starts_with(expected)) return false;
    rest_.remove_prefix(expected.size());
    return true;
  }

  std::string_view whole_;
  std::string_view rest_;
};

}  // namespace

std::string_view name_of(Computation computation) {
  return info_of(computation).name;
}

std::string_view describe(Computation computation) {
  return info_of(computation).description;
}

std::span<const Computation> plain_computations() {
  static constexpr auto kAll = [] {
    std::array<Computation, static_cast<std::size_t>(Computation::Overlap)> all{};
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<Computation>(i);
    return all;
  }();
  return kAll;
}

Action counterpart(const Action& action) {
  const auto opposite = [&] {
    switch (action.computation) {
      case Computation::SendForward: return Computation::RecvForward;
      case Computation::RecvForward: return Computation::SendForward;
      case Computation::SendBackward: return Computation::RecvBackward;
      default: return Computation::SendBackward;
    }
  };
  return message(action.other_stage, opposite(), action.microbatch, action.stage);
}

void append_text(std::string& out, const Action& action) {
  if (action.is_overlap()) {
    out += '(';
    append_text(out, action.first());
    out += ';';
    append_text(out, action.second());
    out += ')';
    out += name_of(Computation::Overlap);
    return;
  }
  append_number(out, action.stage);
  out += name_of(action.computation);
  if (action.microbatch != kNone) append_number(out, action.microbatch);
  if (action.is_message() && action.other_stage != chain_neighbour(action.stage, action.computation)) {
    out += '@';
    append_number(out, action.other_stage);
  }
}

std::string to_string(const Action& action) {
  std::string out;
  append_text(out, action);
  return out;
}

Action parse_action(std::string_view text) {
  const std::string_view body = trimmed(text);
  if (body.empty())
    throw ScheduleError("an empty text is not an action.\n  Hint: 0F1 is stage 0, forward, microbatch 1.");
  return ActionParser(body).action();
}

}  // namespace penstock
