#include "penstock/runtime/record.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace penstock {
namespace {

constexpr double kMillisecond = 1e6;

// When a computation worked: what it waited for comes first.
Span working_span(const ActionRecord& record) {
  return {.start = static_cast<double>(record.start + record.waited) / kMillisecond,
          .end = static_cast<double>(record.end) / kMillisecond};
}

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

Costs costs_of(const Schedule& schedule, const Record& record) {
  // By stage: forwards, input, weight and full backwards.
  std::vector<std::array<std::vector<double>, 4>> times(static_cast<std::size_t>(schedule.stages()));
  std::vector<std::vector<double>> bytes(static_cast<std::size_t>(schedule.stages()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& recorded = record.at(static_cast<std::size_t>(rank));
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      const ActionRecord& own = recorded[i];
      const auto stage = static_cast<std::size_t>(actions[i].stage);
      const Span span = working_span(own);
      if (actions[i].computation <= Computation::FullBackward) {
        times[stage][static_cast<std::size_t>(actions[i].computation)].push_back(span.end - span.start);
      } else if (actions[i].computation == Computation::SendForward) {
        bytes[stage].push_back(static_cast<double>(own.bytes));
      }
    }
  }
  Costs costs;
  for (std::size_t stage = 0; stage < times.size(); ++stage) {
    const auto of = [&](Computation computation) -> const std::vector<double>& {
      return times[stage][static_cast<std::size_t>(computation)];
    };
    // A full backward is an input and a weight backward; which has what part of it cannot be seen.
    const double half = median(of(Computation::FullBackward)) / 2;
    StageCosts own;
    own.forward = median(of(Computation::Forward));
    own.input = median(of(Computation::InputBackward), half);
    own.weight = median(of(Computation::WeightBackward), half);
    own.bytes_sent = median(bytes[stage]);
    costs.stages.push_back(own);
  }
  return costs;
}

}  // namespace penstock
