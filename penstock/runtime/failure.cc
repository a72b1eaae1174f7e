#include "penstock/runtime/failure.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/source.h"

namespace penstock::internal {
namespace {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

struct Place {
  int rank = 0;
  int position = -1;
  std::string reason;
  // True if an action threw there, and did not only wait.
  bool threw = false;
};

class Explanation {
 public:
  explicit Explanation(const FailedStep& step) : step_(step), ranks_(step.schedule->ranks()) {}

  PipelineError error() const {
    const Place place = first_failure();
    return {text(place), computation_at(place)};
  }

 private:
  // Returns the place in the schedule if an action of a microbatch threw there.
  std::optional<FailurePlace> computation_at(const Place& place) const {
    const auto actions = step_.schedule->actions(place.rank % ranks_);
    if (!place.threw || place.position < 0 || place.position >= static_cast<int>(actions.size())) return std::nullopt;
    const Action& action = actions[static_cast<std::size_t>(place.position)];
    if (!action.is_compute() || action.microbatch == kNone) return std::nullopt;
    return FailurePlace{.replica = place.rank / ranks_,
                        .rank = place.rank % ranks_,
                        .stage = action.stage,
                        .microbatch = action.microbatch};
  }

  std::string text(const Place& place) const {
    std::string message = name_of(place.rank);
    const auto actions = step_.schedule->actions(place.rank % ranks_);
    if (place.position >= 0 && place.position < static_cast<int>(actions.size())) {
      const Action& action = actions[static_cast<std::size_t>(place.position)];
      message += concat(", stage ", action.stage, ", ", to_string(action));
      if (action.microbatch != kNone) message += concat(" (microbatch ", action.microbatch, ")");
      // An action that a pass has added is not in the file.
      const ScheduleSource* const source = step_.schedule->source().get();
      const auto in_file = source == nullptr ? std::nullopt : source->place_of(place.rank % ranks_, action);
      if (in_file) message += concat(", ", *in_file);
    }
    if (place.position == static_cast<int>(actions.size())) message += ", at the end of the step";
    message += concat(": ", place.reason);
    for (int rank = 0; rank < static_cast<int>(step_.reports.size()); ++rank) {
      if (rank != place.rank) message += concat("\n  ", name_of(rank), ": ", state_of(rank));
    }
    message.append("\n").append(table_of(
        *step_.schedule,
        {.mark_rank = place.rank % ranks_, .mark_position = place.position, .steps_around = 3, .most_ranks = 8}));
    return message;
  }

  const std::optional<RankReport>& report(int rank) const { return step_.reports[static_cast<std::size_t>(rank)]; }
  bool has_report(int rank) const {
    return rank >= 0 && rank < static_cast<int>(step_.reports.size()) && report(rank).has_value();
  }

  std::string name_of(int rank) const {
    std::string name = concat("rank ", rank % ranks_);
    if (static_cast<int>(step_.reports.size()) <= ranks_) return name;
    return concat("replica ", rank / ranks_, ", ", name);
  }

  std::string state_of(int rank) const {
    if (!has_report(rank)) return "did not answer";
    const RankReport& found = *report(rank);
    const auto actions = step_.schedule->actions(rank % ranks_);
    if (found.position < 0) return "had not begun";
    if (found.position > static_cast<int>(actions.size())) return "had ended";
    const bool at_end = found.position == static_cast<int>(actions.size());
    std::string text = at_end ? "was at the end of the step"
                              : concat("was in ", to_string(actions[static_cast<std::size_t>(found.position)]));
    text += concat(" for ", seconds_text(found.seconds_there));
    if (found.waiting_for >= 0) text += concat(", waiting for ", name_of(found.waiting_for));
    return text;
  }

  // Chooses the failure to report: an exception in a rank before a timeout, and a timeout before a lost connection, as
  // the later ones often follow from the earlier ones.
  Place first_failure() const {
    using Kind = RankReport::Kind;
    for (const Kind kind : {Kind::Failed, Kind::Timeout, Kind::PeerLost}) {
      for (int rank = 0; rank < static_cast<int>(step_.reports.size()); ++rank) {
        if (!has_report(rank) || report(rank)->kind != kind) continue;
        if (kind == Kind::Timeout) return last_waiter(rank);
        if (kind == Kind::PeerLost) return first_symptom(report(rank)->failure);
        return {rank, report(rank)->position, report(rank)->failure, /*threw=*/true};
      }
    }
    return first_symptom(step_.reason);
  }

  // Follows a timeout to its origin: the rank that was waited for may itself have waited for another all the time, and
  // that one for a third. In a cycle there is no origin, and the rank itself is reported.
  Place last_waiter(int rank) const {
    const std::string deadline = " of " + seconds_text(step_.timeout_seconds) + ".";
    const Place here{rank, report(rank)->position, report(rank)->failure + deadline};
    std::set<int> seen{rank};
    int waiter = rank;
    for (int next = report(rank)->waiting_for; waits_long(next); next = report(next)->waiting_for) {
      if (!seen.insert(next).second) return here;
      waiter = next;
    }
    if (waiter == rank) return here;
    const RankReport& last = *report(waiter);
    const std::string reason = concat(is_sending(waiter) ? "no receive was posted on" : "no message came from",
                                      " rank ", last.waiting_for % ranks_, " within the deadline");
    return {waiter, last.position, (last.failure.empty() ? reason : last.failure) + deadline};
  }
  // Returns true if a rank waits for its message to be received.
  bool is_sending(int rank) const {
    const auto actions = step_.schedule->actions(rank % ranks_);
    const int position = report(rank)->position;
    if (position < 0) return false;
    if (position >= static_cast<int>(actions.size())) return true;
    const Computation computation = actions[static_cast<std::size_t>(position)].computation;
    return computation == Computation::SendForward || computation == Computation::SendBackward;
  }
  bool waits_long(int rank) const {
    return has_report(rank) && report(rank)->waiting_for >= 0 &&
           report(rank)->seconds_there >= step_.timeout_seconds / 2;
  }

  // Chooses the rank to report if no rank has failed by itself: first one that waits for a rank that does not answer,
  // then one that waits for none.
  Place first_symptom(const std::string& reason) const {
    const auto order = [this](int rank) {
      if (!has_report(rank)) return 4;
      const RankReport& found = *report(rank);
      if (found.waiting_for >= 0 && !has_report(found.waiting_for)) return 0;
      const bool in_action =
          found.position >= 0 && found.position < static_cast<int>(step_.schedule->actions(rank % ranks_).size());
      if (!in_action) return 3;
      return found.waiting_for < 0 ? 1 : 2;
    };
    int best = 0;
    for (int rank = 1; rank < static_cast<int>(step_.reports.size()); ++rank) {
      if (order(rank) < order(best)) best = rank;
    }
    return {best, has_report(best) ? report(best)->position : -1, reason};
  }

  const FailedStep& step_;
  int ranks_;
};

}  // namespace

std::string encode_report(const RankReport& report) {
  std::ostringstream text;
  text << report.position << ' ' << report.seconds_there << ' ' << report.waiting_for << ' '
       << static_cast<int>(report.kind) << '\n'
       << report.failure;
  return text.str();
}

RankReport decode_report(const std::string& text) {
  std::istringstream in(text);
  RankReport report;
  int kind = 0;
  if (!(in >> report.position >> report.seconds_there >> report.waiting_for >> kind)) return {};
  report.kind = static_cast<RankReport::Kind>(kind);
  report.failure = text.substr(std::min(text.size(), text.find('\n') + 1));
  return report;
}

PipelineError explain(const FailedStep& step) {
  return Explanation(step).error();
}

}  // namespace penstock::internal
