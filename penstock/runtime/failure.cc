#include "penstock/runtime/failure.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <utility>

#include "penstock/schedule/draw.h"
#include "penstock/schedule/source.h"

namespace penstock::internal {
namespace {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, seconds < 10 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

// What failed, and where.
struct Place {
  int rank = 0;
  int position = -1;
  std::string what;
  // Whether an action threw there, and not only waited.
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
  // Where in the schedule an action of a microbatch threw; none for anything else.
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
      message += ", stage " + std::to_string(action.stage) + ", " + to_string(action);
      if (action.microbatch != kNone) message += " (microbatch " + std::to_string(action.microbatch) + ")";
      // An action that a pass has added is not in the file.
      const ScheduleSource* const source = step_.schedule->source().get();
      const auto in_file = source == nullptr ? std::nullopt : source->place_of(place.rank % ranks_, action);
      if (in_file) message += ", " + *in_file;
    }
    if (place.position == static_cast<int>(actions.size())) message += ", at the end of the step";
    message += ": " + place.what;
    for (int rank = 0; rank < static_cast<int>(step_.reports.size()); ++rank) {
      if (rank != place.rank) message.append("\n  ").append(name_of(rank)).append(": ").append(seen(rank));
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
    std::string own = "rank " + std::to_string(rank % ranks_);
    if (static_cast<int>(step_.reports.size()) <= ranks_) return own;
    return "replica " + std::to_string(rank / ranks_) + ", " + own;
  }

  std::string seen(int rank) const {
    if (!has_report(rank)) return "did not answer";
    const RankReport& found = *report(rank);
    const auto actions = step_.schedule->actions(rank % ranks_);
    if (found.position < 0) return "had not begun";
    if (found.position > static_cast<int>(actions.size())) return "had ended";
    const bool at_end = found.position == static_cast<int>(actions.size());
    std::string text = at_end ? "was at the end of the step"
                              : "was in " + to_string(actions[static_cast<std::size_t>(found.position)]);
    text.append(" for ").append(seconds_text(found.seconds_there));
    if (found.waiting_for >= 0) text += ", waiting for " + name_of(found.waiting_for);
    return text;
  }

  // Something that went wrong in a rank counts more than that one was late, and that more than that one is gone.
  Place first_failure() const {
    using Kind = RankReport::Kind;
    for (const Kind kind : {Kind::Failed, Kind::WasLate, Kind::IsGone}) {
      for (int rank = 0; rank < static_cast<int>(step_.reports.size()); ++rank) {
        if (!has_report(rank) || report(rank)->kind != kind) continue;
        if (kind == Kind::WasLate) return last_waiter(rank);
        if (kind == Kind::IsGone) return where_it_shows(report(rank)->failure);
        return {rank, report(rank)->position, report(rank)->failure, /*threw=*/true};
      }
    }
    return where_it_shows(step_.what);
  }

  // A rank that was late may itself have waited for another all the time, and that one for a third.
  Place last_waiter(int rank) const {
    const std::string deadline = " of " + seconds_text(step_.timeout_seconds) + ".";
    Place own{rank, report(rank)->position, report(rank)->failure + deadline};
    std::set<int> seen{rank};
    int waiter = rank;
    for (int next = report(rank)->waiting_for; waits_long(next); next = report(next)->waiting_for) {
      if (!seen.insert(next).second) return own;
      waiter = next;
    }
    if (waiter == rank) return own;
    const RankReport& last = *report(waiter);
    const std::string whom = "rank " + std::to_string(last.waiting_for % ranks_) + " within the deadline";
    const std::string what = sends(waiter) ? "no receive was posted on " + whom : "no message came from " + whom;
    return {waiter, last.position, (last.failure.empty() ? what : last.failure) + deadline};
  }
  // Whether a rank waits for its message to be taken.
  bool sends(int rank) const {
    const auto actions = step_.schedule->actions(rank % ranks_);
    const int position = report(rank)->position;
    if (position >= static_cast<int>(actions.size())) return true;
    const Computation computation = actions[static_cast<std::size_t>(position)].computation;
    return computation == Computation::SendForward || computation == Computation::SendBackward;
  }
  bool waits_long(int rank) const {
    return has_report(rank) && report(rank)->waiting_for >= 0 &&
           report(rank)->seconds_there >= step_.timeout_seconds / 2;
  }

  // No rank has failed by itself. Who waits for one that does not answer comes first, then who waits for nobody.
  Place where_it_shows(const std::string& what) const {
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
    return {best, has_report(best) ? report(best)->position : -1, what};
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
