// Parts that all drawings share: a rank's actions as blocks of time, the colours of computations, and texts.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/schedule/draw.h"

namespace penstock::internal {

// An action, or a part of a pair, with its span.
struct Block {
  Action action;
  Span span;
  // Number of the pair that the block is a part of, from 1; 0 if it is not a part of a pair.
  int pair = 0;
};

// Calls visit(block) for each action of a rank that is to be drawn, and for each part of a pair.
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

// Returns true if transfers were measured on any rank.
bool has_transfers(const Timeline& timeline);

// Returns what a transfer is, with its action: "1RECV_F0 from rank 0".
std::string transfer_text(const Action& message, const Transfer& transfer);

// Returns for each transfer of a rank, in their order, the first lane in which it overlaps no other one. Sends have
// lanes of their own, and so have receives.
std::vector<int> transfer_lanes(const Drawing& drawing, int rank);

// Colour of a computation, for SVG and for a terminal (an index of the 256-colour palette).
struct Colour {
  std::string_view hex;
  int terminal;
};
// Returns the colour of F, I, W, B or R; of a message, that of F for activations and that of B for gradients. The palette is safe for the colour-blind. Each has two shades, which alternate
// over the stages of a rank.
Colour colour_of(const Drawing& drawing, const Action& part);

// Returns a number with up to six significant digits and without trailing zeros: "51.5", "0.0667".
std::string number_text(double value);
// Returns the metrics of the timeline: "makespan 51.5   bubble 6.8 %   peak activations 16", with `separator` between
// them.
std::string metrics_text(const Drawing& drawing, std::string_view separator);
// Returns the skip connections and shared parameters of a schedule, "skip 0 -> 3   shared by stages 0 7", or an empty
// text.
std::string graph_text(const Schedule& schedule);
// Returns the computations of the legend: F, I, W and B, and R if the schedule has one.
std::vector<Computation> legend_of(const Schedule& schedule);

}  // namespace penstock::internal
