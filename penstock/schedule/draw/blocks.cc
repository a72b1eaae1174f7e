#include "penstock/schedule/draw/blocks.h"
#include "penstock/schedule/draw/xml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace penstock::internal {
namespace {

// The page's hues, lighter where its labels are dark on all of them; beside each a terminal's nearest.
constexpr std::array<std::array<Colour, 2>, 4> kPalette = {{
    {{{"#5b8ede", 68}, {"#9fbdf0", 111}}},   // F
    {{{"#e0a92c", 178}, {"#fbe4ab", 223}}},  // I
    {{{"#3bb8a8", 73}, {"#bdf1e7", 158}}},   // W
    {{{"#d0586f", 167}, {"#e6a5ac", 217}}},  // B
}};

}  // namespace

Colour colour_of(const Drawing& drawing, const Action& part) {
  const auto local = drawing.schedule.placement().stages_of(drawing.schedule.placement().rank_of(part.stage));
  const auto position = std::ranges::lower_bound(local, part.stage) - local.begin();
  return kPalette[static_cast<std::size_t>(part.computation) % kPalette.size()][static_cast<std::size_t>(position % 2)];
}

std::string number_text(double value) {
  std::array<char, 32> text;
  const int length = std::snprintf(text.data(), text.size(), "%.6g", value);
  return {text.data(), static_cast<std::size_t>(length)};
}

std::string xml_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < ' ' ? '?' : c; break;
    }
  }
  return out;
}

std::string figures_of(const Drawing& drawing, std::string_view between) {
  const Timeline& timeline = drawing.timeline;
  const auto& ranks = timeline.ranks;
  const double bytes = std::ranges::max(ranks, {}, &RankTimes::peak_bytes).peak_bytes;
  std::string text = "makespan " + number_text(timeline.makespan);
  text.append(between).append("bubble ").append(number_text(std::round(timeline.bubble * 1000) / 10)).append(" %");
  text.append(between).append("peak activations ");
  text.append(std::to_string(std::ranges::max(ranks, {}, &RankTimes::peak_activations).peak_activations));
  if (bytes > 0) text.append(between).append("peak bytes ").append(number_text(bytes));
  return text;
}

std::string extras_of(const Schedule& schedule) {
  std::vector<std::string> extras;
  for (const Edge& edge : schedule.graph().skips()) {
    extras.push_back("skip " + std::to_string(edge.from) + " -> " + std::to_string(edge.to));
  }
  for (const auto& group : schedule.graph().groups()) {
    extras.emplace_back("shared by stages");
    for (const int stage : group) extras.back().append(" ").append(std::to_string(stage));
  }
  std::string text;
  for (const std::string& extra : extras) text.append(text.empty() ? "" : "   ").append(extra);
  return text;
}

}  // namespace penstock::internal
