#include "penstock/schedule/draw/blocks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

// The hues of page.html, but light enough for dark labels, each with the nearest colour of a terminal.
constexpr std::array<std::array<Colour, 2>, 5> kPalette = {{
    {{{"#5b8ede", 68}, {"#9fbdf0", 111}}},   // F
    {{{"#e0a92c", 178}, {"#fbe4ab", 223}}},  // I
    {{{"#3bb8a8", 73}, {"#bdf1e7", 158}}},   // W
    {{{"#d0586f", 167}, {"#e6a5ac", 217}}},  // B
    {{{"#9a7fd1", 140}, {"#d6c8f2", 189}}},  // R
}};

}  // namespace

bool has_transfers(const Timeline& timeline) {
  return std::ranges::any_of(timeline.ranks, [](const RankTimes& times) { return !times.transfers.empty(); });
}

std::string transfer_text(const Action& message, const Transfer& transfer) {
  if (transfer.peer < 0) return to_string(message);
  return concat(to_string(message), message.is_send() ? " to rank " : " from rank ", transfer.peer);
}

std::vector<int> transfer_lanes(const Drawing& drawing, int rank) {
  const auto actions = drawing.schedule.actions(rank);
  const std::vector<Transfer>& transfers = drawing.timeline.ranks[static_cast<std::size_t>(rank)].transfers;
  std::vector<std::size_t> order(transfers.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return transfers[i].span.start; });
  std::vector<int> lanes(transfers.size());
  // Times at which the lanes of receives and of sends become free.
  std::array<std::vector<double>, 2> ends;
  for (const std::size_t i : order) {
    const Span& span = transfers[i].span;
    std::vector<double>& free = ends[actions[transfers[i].action].is_send() ? 1 : 0];
    const auto found = std::ranges::find_if(free, [&](double end) { return end <= span.start; });
    lanes[i] = static_cast<int>(found - free.begin());
    if (found == free.end()) {
      free.push_back(span.end);
    } else {
      *found = span.end;
    }
  }
  return lanes;
}

Colour colour_of(const Drawing& drawing, const Action& part) {
  const auto local = drawing.schedule.placement().stages_of(drawing.schedule.placement().rank_of(part.stage));
  const auto position = std::ranges::lower_bound(local, part.stage) - local.begin();
  const Computation computation = !part.is_message()          ? part.computation
                                  : part.carries_activation() ? Computation::Forward
                                                              : Computation::FullBackward;
  return kPalette[static_cast<std::size_t>(computation) % kPalette.size()][static_cast<std::size_t>(position % 2)];
}

std::vector<Computation> legend_of(const Schedule& schedule) {
  std::vector<Computation> legend = {Computation::Forward, Computation::InputBackward, Computation::WeightBackward,
                                     Computation::FullBackward};
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    if (std::ranges::find(schedule.actions(rank), Computation::Recompute, &Action::computation) ==
        schedule.actions(rank).end()) {
      continue;
    }
    legend.push_back(Computation::Recompute);
    break;
  }
  return legend;
}

std::string number_text(double value) {
  std::array<char, 32> text;
  const int length = std::snprintf(text.data(), text.size(), "%.6g", value);
  return {text.data(), static_cast<std::size_t>(length)};
}

std::string metrics_text(const Drawing& drawing, std::string_view separator) {
  const Timeline& timeline = drawing.timeline;
  const double bubble = std::round(timeline.bubble * 1000) / 10;
  const int activations = std::ranges::max(timeline.ranks, {}, &RankTimes::peak_activations).peak_activations;
  const double bytes = std::ranges::max(timeline.ranks, {}, &RankTimes::peak_bytes).peak_bytes;
  std::vector<std::string> metrics = {concat("makespan ", number_text(timeline.makespan)),
                                      concat("bubble ", number_text(bubble), " %"),
                                      concat("peak activations ", activations)};
  if (bytes > 0) metrics.push_back(concat("peak bytes ", number_text(bytes)));
  return join(metrics, separator);
}

std::string graph_text(const Schedule& schedule) {
  std::vector<std::string> parts;
  for (const Edge& edge : schedule.graph().skips()) parts.push_back(concat("skip ", edge.from, " -> ", edge.to));
  for (const auto& group : schedule.graph().groups()) parts.push_back(concat("shared by stages ", join(group, " ")));
  return join(parts, "   ");
}

}  // namespace penstock::internal
