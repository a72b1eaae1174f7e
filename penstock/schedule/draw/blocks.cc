#include "penstock/schedule/draw/blocks.h"

#include <algorithm>
#include <cstdio>

namespace penstock {
namespace {

constexpr std::array<std::array<Colour, 2>, 4> kPalette = {{
    {{{"#56b4e9", 75}, {"#2f7fb8", 32}}},   // F
    {{{"#f0b429", 214}, {"#c98a00", 172}}},  // I
    {{{"#3fbf8f", 78}, {"#1b8a63", 35}}},   // W
    {{{"#e07b4f", 209}, {"#b8532a", 166}}},  // B
}};

}  // namespace

Colour colour_of(const Drawing& drawing, const Action& part) {
  const auto local = drawing.schedule.placement().stages_of(drawing.schedule.placement().rank_of(part.stage));
  const auto position = std::ranges::lower_bound(local, part.stage) - local.begin();
  return kPalette[static_cast<std::size_t>(part.computation) % kPalette.size()][static_cast<std::size_t>(position % 2)];
}

std::string subtitle_of(const Drawing& drawing) {
  const auto count = [](int number, const std::string& what) {
    const char* const plural = what.ends_with("ch") ? "es" : "s";
    return std::to_string(number) + " " + what + (number == 1 ? "" : plural);
  };
  const Schedule& schedule = drawing.schedule;
  return count(schedule.ranks(), "rank") + ", " + count(schedule.stages(), "stage") + ", " +
         count(schedule.microbatches(), "microbatch");
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
      default: out += c; break;
    }
  }
  return out;
}

int most_activations(const Timeline& timeline) {
  return std::ranges::max(timeline.ranks, {}, &RankTimes::peak_activations).peak_activations;
}

double most_bytes(const Timeline& timeline) {
  return std::ranges::max(timeline.ranks, {}, &RankTimes::peak_bytes).peak_bytes;
}

}  // namespace penstock
