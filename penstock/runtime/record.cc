#include "penstock/runtime/record.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "penstock/runtime/receives.h"
#include "penstock/schedule/liveness.h"

namespace penstock {

using internal::for_each_receive;
using internal::kMillisecond;
using internal::ReceivedMessage;
using internal::Sends;
using internal::working_span;

namespace {

Transfer transfer_of(const Action& action, std::size_t index, const ActionRecord& recorded, const Sends& sends) {
  std::int64_t start = recorded.transfer_start;
  // A device backend begins to receive when the receive is posted, but nothing arrives before the sender has begun.
  if (action.is_recv()) {
    const ActionRecord* const send = sends.of(action);
    if (send != nullptr && send->has_transfer()) {
      start = std::clamp(send->transfer_start, start, std::max(start, recorded.transfer_end));
    }
  }
  return {.action = index,
          .span = {.start = static_cast<double>(start) / kMillisecond,
                   .end = static_cast<double>(recorded.transfer_end) / kMillisecond},
          .peer = recorded.peer,
          .bytes = static_cast<double>(recorded.bytes)};
}

}  // namespace

Timeline timeline_of(const Schedule& schedule, const Record& record) {
  const Sends sends(schedule, record);
  Timeline timeline;
  double work = 0;
  double first = -1;
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    RankTimes times;
    const auto& recorded = record.at(static_cast<std::size_t>(rank));
    const auto actions = schedule.actions(rank);
    double end_of_last = 0;
    double end_of_collective = 0;
    bool begun = false;
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      const Span span = working_span(recorded[i]);
      times.spans.push_back(span);
      if (recorded[i].has_transfer()) times.transfers.push_back(transfer_of(actions[i], i, recorded[i], sends));
      if (recorded[i].peak_allocated > 0) {
        times.memory.push_back({.time = span.start, .bytes = static_cast<double>(recorded[i].peak_allocated)});
        times.memory.push_back({.time = span.end, .bytes = static_cast<double>(recorded[i].allocated)});
        times.peak_bytes = std::max(times.peak_bytes, static_cast<double>(recorded[i].peak_allocated));
      }
      if (actions[i].computation == Computation::SumShared) end_of_collective = span.end;
      if (!actions[i].is_compute()) continue;
      if (!begun) times.fill = span.start;
      if (begun && recorded[i].peer >= 0) times.waiting[recorded[i].peer] += span.start - end_of_last;
      first = first < 0 ? span.start : std::min(first, span.start);
      begun = true;
      times.work += span.end - span.start;
      end_of_last = std::max(end_of_last, span.end);
    }
    times.peak_activations = peak_activations(schedule, rank);
    if (begun) times.span = std::max(end_of_last, end_of_collective) - times.fill;
    timeline.longest_span = std::max(timeline.longest_span, times.span);
    work += times.work;
    timeline.makespan = std::max(timeline.makespan, end_of_last);
    timeline.ranks.push_back(std::move(times));
  }
  for (RankTimes& times : timeline.ranks) {
    double last = 0;
    for (const Span& span : times.spans) last = std::max(last, span.end);
    times.drain = std::max(0.0, timeline.makespan - last);
  }
  const auto num_recorded = std::ranges::count_if(record, [](const auto& actions) { return !actions.empty(); });
  if (timeline.makespan > 0) timeline.bubble = 1 - work / (static_cast<double>(num_recorded) * timeline.makespan);
  return timeline;
}

Record with_common_clock(const Schedule& schedule, Record record) {
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  // Least time between a send and the end of its receive, by sender and receiver, each by the clock of its own rank.
  constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
  std::vector<std::vector<std::int64_t>> fastest(ranks, std::vector<std::int64_t>(ranks, kNever));
  for_each_receive(schedule, record, [&](const ReceivedMessage& message) {
    std::int64_t& known = fastest[static_cast<std::size_t>(message.from)][static_cast<std::size_t>(message.to)];
    known = std::min(known, message.received - message.sent);
  });
  // A breadth-first search over pairs of ranks that have sent each other messages: how far each clock is ahead of that
  // of the rank that the search began with.
  std::vector<std::int64_t> ahead(ranks, 0);
  std::vector<char> reached(ranks, 0);
  std::vector<std::size_t> next;
  for (std::size_t first = 0; first < ranks; ++first) {
    if (!std::exchange(reached[first], 1)) next.push_back(first);
    while (!next.empty()) {
      const std::size_t here = next.back();
      next.pop_back();
      for (std::size_t other = 0; other < ranks; ++other) {
        if (fastest[here][other] == kNever || fastest[other][here] == kNever || std::exchange(reached[other], 1))
          continue;
        ahead[other] = ahead[here] + (fastest[here][other] - fastest[other][here]) / 2;
        next.push_back(other);
      }
    }
  }
  const std::int64_t began_first = *std::ranges::max_element(ahead);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (ActionRecord& action : record[rank]) {
      action.start += began_first - ahead[rank];
      action.end += began_first - ahead[rank];
      if (!action.has_transfer()) continue;
      action.transfer_start += began_first - ahead[rank];
      action.transfer_end += began_first - ahead[rank];
    }
  }
  return record;
}

}  // namespace penstock
