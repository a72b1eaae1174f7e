#include "penstock/schedule/verify.h"

#include <functional>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/schedule/draw.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify/tables.h"

namespace penstock {
namespace {

using internal::concat;

std::optional<Violation> violation_of(const std::function<void()>& check) {
  try {
    check();
    return std::nullopt;
  } catch (internal::ViolationFound& found) {
    return std::move(found.violation);
  }
}

}  // namespace

std::optional<Violation> verify(const Schedule& schedule) {
  Features expected = features_of(schedule);
  // A schedule that reduces gradients must also sum those of shared parameters.
  expected.shared_sums |= expected.reduction && !schedule.graph().groups().empty();
  return verify(schedule, expected);
}

std::optional<Violation> verify(const Schedule& schedule, const Features& expected) {
  return violation_of([&] {
    internal::check_lists(schedule, expected);
    internal::check_deadlock(schedule, expected);
  });
}

std::optional<Violation> verify_each_list(const Schedule& schedule, const Features& expected) {
  return violation_of([&] { internal::check_lists(schedule, expected); });
}

std::string explain(const Schedule& schedule, const Violation& violation) {
  const auto actions = schedule.actions(violation.rank);
  const auto position = static_cast<std::size_t>(violation.position);
  const std::string rank = concat("rank ", violation.rank);
  std::string where;
  if (position >= actions.size()) {
    if (schedule.source() != nullptr) where = concat(schedule.source()->line_of(violation.rank), ": ");
    where += concat(rank, ", at the end of its ", actions.size(), " actions");
  } else if (schedule.source() != nullptr) {
    where = concat(place_text(schedule, violation.rank, position), ": ", rank, ", ", to_string(actions[position]));
  } else {
    where = concat(rank, ", ", place_text(schedule, violation.rank, position), ", ", to_string(actions[position]));
  }
  const std::string excerpt = table_of(
      schedule, {.mark_rank = violation.rank, .mark_position = violation.position, .steps_around = 5, .most_ranks = 8});
  return concat(where, ": ", violation.what, "\n\n", excerpt);
}

void require_lists(const Schedule& schedule) {
  if (const auto violation = verify_each_list(schedule, features_of(schedule))) {
    throw ScheduleError(explain(schedule, *violation));
  }
}

void require_valid(const Schedule& schedule) {
  if (const auto violation = verify(schedule)) {
    throw ScheduleError(explain(schedule, *violation));
  }
}

}  // namespace penstock
