#include "penstock/runtime/record.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "penstock/runtime/receives.h"

namespace penstock {
namespace {

// How many microbatches a rank keeps at most, by its list.
int peak_activations(std::span<const Action> actions) {
  int kept = 0;
  int peak = 0;
  for (const Action& action : actions) {
    for_each_part(action, [&](const Action& part) {
      if (!part.is_compute()) return;
      if (is_forward(part)) peak = std::max(peak, ++kept);
      if (makes_weight_gradient(part)) --kept;
    });
  }
  return peak;
}

}  // namespace

Timeline timeline_of(const Schedule& schedule, const Record& record) {
  Timeline timeline;
  double work = 0;
  double first = -1;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    RankTimes times;
    const auto& own = record.at(static_cast<std::size_t>(rank));
    const auto actions = schedule.actions(rank);
    double end_of_last = 0;
    bool begun = false;
    for (std::size_t i = 0; i < own.size(); ++i) {
      const Span span = working_span(own[i]);
      times.spans.push_back(span);
      if (!actions[i].is_compute()) continue;
      if (!begun) times.fill = span.start;
      if (begun && own[i].peer >= 0) times.waiting[own[i].peer] += span.start - end_of_last;
      first = first < 0 ? span.start : std::min(first, span.start);
      begun = true;
      times.work += span.end - span.start;
      end_of_last = std::max(end_of_last, span.end);
    }
    times.peak_activations = peak_activations(actions);
    work += times.work;
    timeline.makespan = std::max(timeline.makespan, end_of_last);
    timeline.ranks.push_back(std::move(times));
  }
  for (RankTimes& times : timeline.ranks) {
    double last = 0;
    for (const Span& span : times.spans) last = std::max(last, span.end);
    times.drain = std::max(0.0, timeline.makespan - last);
  }
  const auto recorded = std::count_if(record.begin(), record.end(), [](const auto& own) { return !own.empty(); });
  if (timeline.makespan > 0) timeline.bubble = 1 - work / (static_cast<double>(recorded) * timeline.makespan);
  return timeline;
}

Record with_common_clock(const Schedule& schedule, Record record) {
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  // By sender and receiver: the least time between a send and the end of its receive, each by its own rank's clock.
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  std::vector<std::vector<std::int64_t>> least(ranks, std::vector<std::int64_t>(ranks, kNever));
  for_each_receive(schedule, record, [&](const Received& one) {
    std::int64_t& known = least[static_cast<std::size_t>(one.from)][static_cast<std::size_t>(one.to)];
    known = std::min(known, one.taken - one.sent);
  });
  // How far each clock is ahead of that of the rank that it was reached from, and whether it was.
  std::vector<std::int64_t> ahead(ranks, 0);
  std::vector<char> reached(ranks, 0);
  std::vector<std::size_t> next;
  for (std::size_t first = 0; first < ranks; ++first) {
    if (!std::exchange(reached[first], 1)) next.push_back(first);
    while (!next.empty()) {
      const std::size_t here = next.back();
      next.pop_back();
      for (std::size_t other = 0; other < ranks; ++other) {
        if (least[here][other] == kNever || least[other][here] == kNever || std::exchange(reached[other], 1)) continue;
        ahead[other] = ahead[here] + (least[here][other] - least[other][here]) / 2;
        next.push_back(other);
      }
    }
  }
  const std::int64_t began_first = *std::ranges::max_element(ahead);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (ActionRecord& own : record[rank]) {
      own.start += began_first - ahead[rank];
      own.end += began_first - ahead[rank];
    }
  }
  return record;
}

}  // namespace penstock
