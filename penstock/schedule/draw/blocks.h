// What all drawings have in common: a rank's actions as blocks of time, the colours of computations, and text that is
// safe inside XML and JSON.
#pragma once

#include <array>
#include <cstddef>
#include <ostream>
#include <string>
#include <string_view>

#include "penstock/schedule/draw.h"

namespace penstock::internal {

// One action, or one part of a pair, in its time.
struct Block {
  Action action;
  Span span;
  // Of a pair's parts the same number, from 1 on; 0 outside of pairs.
  int pair = 0;
};

// Calls visit(block) for each action of a rank that is to be drawn, with pairs taken apart.
template <class Visit>
void for_each_block(const Drawing& drawing, int rank, Visit&& visit) {
  const auto actions = drawing.schedule.actions(rank);
  const auto& spans = drawing.timeline.ranks[static_cast<std::size_t>(rank)].spans;
  int pairs = 0;
  for (std::size_t i = 0; i < actions.size(); ++i) {
    if (!drawing.all_actions && !actions[i].is_compute()) continue;
    if (actions[i].is_overlap()) {
      const PairSpans parts = split_pair(actions[i], spans[i], drawing.costs);
      ++pairs;
      visit(Block{actions[i].first(), parts.first, pairs});
      visit(Block{actions[i].second(), parts.second, pairs});
    } else {
      visit(Block{actions[i], spans[i]});
    }
  }
}

// F, I, W, B: a palette that the colour-blind can tell apart, in two shades, by whether the stage is an even or an odd
// one of its rank's.
struct Colour {
  std::string_view hex;
  int terminal;
};
Colour colour_of(const Drawing& drawing, const Action& part);

// "51.5", "0.0667": up to six digits, none of them in vain.
std::string number_text(double value);
// "makespan 51.5   bubble 6.8 %   peak activations 16", with `between` in between.
std::string figures_of(const Drawing& drawing, std::string_view between);
// "skip 0 -> 3   shared by stages 0 7", or nothing.
std::string extras_of(const Schedule& schedule);
// F, I, W and B, for legends.
inline constexpr std::array kDrawnComputations = {Computation::Forward, Computation::InputBackward,
                                                  Computation::WeightBackward, Computation::FullBackward};

}  // namespace penstock::internal
