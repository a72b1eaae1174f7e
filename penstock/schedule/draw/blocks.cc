#include "penstock/schedule/draw/blocks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
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

Colour colour_of(const Drawing& drawing, const Action& part) {
  const auto local = drawing.schedule.placement().stages_of(drawing.schedule.placement().rank_of(part.stage));
  const auto position = std::ranges::lower_bound(local, part.stage) - local.begin();
  return kPalette[static_cast<std::size_t>(part.computation) % kPalette.size()][static_cast<std::size_t>(position % 2)];
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
