#include "penstock/schedule/verify.h"

#include <functional>
#include <utility>

#include "penstock/schedule/draw.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify/tables.h"

namespace penstock {
namespace {

std::optional<Violation> found_by(const std::function<void()>& look) {
  try {
    look();
    return std::nullopt;
  } catch (Found& found) {
    return std::move(found.violation);
  }
}

}  // namespace

std::optional<Violation> verify(const Schedule& schedule) {
  Features expected = features_of(schedule);
  // Where gradients are reduced, those of shared parameters are summed.
  expected.shared_sums |= expected.reduction && !schedule.graph().groups().empty();
  return verify(schedule, expected);
}

std::optional<Violation> verify(const Schedule& schedule, const Features& expected) {
  return found_by([&] {
    look_at_lists(schedule, expected);
    run_lists(schedule, expected);
  });
}

std::optional<Violation> verify_each_list(const Schedule& schedule, const Features& expected) {
  return found_by([&] { look_at_lists(schedule, expected); });
}

std::string explain(const Schedule& schedule, const Violation& violation) {
  const auto actions = schedule.actions(violation.rank);
  const auto position = static_cast<std::size_t>(violation.position);
  const std::string rank = "rank " + std::to_string(violation.rank);
  std::string text;
  if (position >= actions.size()) {
    if (schedule.source() != nullptr) text = schedule.source()->line_of(violation.rank) + ": ";
    text += rank + ", at the end of its " + std::to_string(actions.size()) + " actions";
  } else if (schedule.source() != nullptr) {
    text = place_text(schedule, violation.rank, position) + ": " + rank + ", " + to_string(actions[position]);
  } else {
    text = rank + ", " + place_text(schedule, violation.rank, position) + ", " + to_string(actions[position]);
  }
  return text + ": " + violation.what + "\n\n" +
         table_of(
             schedule,
             {.mark_rank = violation.rank, .mark_position = violation.position, .steps_around = 5, .most_ranks = 8});
}

void require_lists(const Schedule& schedule) {
  const auto violation = verify_each_list(schedule, features_of(schedule));
  if (violation) throw ScheduleError(explain(schedule, *violation));
}

void require_valid(const Schedule& schedule) {
  if (const auto violation = verify(schedule)) throw ScheduleError(explain(schedule, *violation));
}

}  // namespace penstock
