// ZBVZeroBubble: two stages per rank in a V placement, with split backwards.
//
//   rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
//   rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
//
// If F, I and W cost the same, no rank idles between its first and its last action. Every rank saves as many
// activations as the first rank of 1F1B. From Qi et al., "Pipeline Parallelism with Controllable Memory".
#include <algorithm>

#include "penstock/schedule/generators.h"

namespace penstock {
namespace {

// One of a rank's two stages, with the number of microbatches that have run so far.
struct Chunk {
  int stage;
  int forwards = 0;
  int inputs = 0;
  int weights = 0;
};

}  // namespace

Schedule zbv_zero_bubble(int ranks, int microbatches) {
  const int covered = std::max(2 * ranks - 1, microbatches);
  Schedule schedule(v_placement(ranks, /*stages_per_rank=*/2), microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    Chunk down{.stage = rank};
    Chunk up{.stage = 2 * ranks - 1 - rank};
    const auto add = [&](const Action& action) {
      if (action.microbatch < microbatches) schedule.add(rank, action);
    };
    const auto add_forward = [&](Chunk& chunk) { add(forward(chunk.stage, chunk.forwards++)); };
    const auto add_input = [&](Chunk& chunk) { add(input_backward(chunk.stage, chunk.inputs++)); };
    const auto add_weight = [&](Chunk& chunk) { add(weight_backward(chunk.stage, chunk.weights++)); };

    // Warm-up: forwards of the first stage, until microbatch 0 arrives at the second.
    for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) add_forward(down);
    // Forwards of both stages.
    for (int i = 0; i < rank; ++i) {
      add_forward(up);
      add_forward(down);
    }
    // The second stage starts its backwards.
    for (int i = 0; i < ranks - rank; ++i) {
      add_forward(up);
      add_input(up);
      add_weight(up);
    }
    // Steady state: F, I and W of both stages.
    while (up.forwards < down.forwards || down.forwards < covered) {
      if (down.forwards < covered) add_forward(down);
      add_input(down);
      add_weight(down);
      add_forward(up);
      add_input(up);
      add_weight(up);
    }
    // Cool-down: input gradients first, as other ranks wait for them.
    for (int i = 0; i < rank; ++i) {
      add_input(down);
      add_input(up);
    }
    for (int i = 0; i < ranks - rank; ++i) {
      add_input(down);
      add_weight(down);
    }
    // Deferred weight gradients.
    while (up.weights < up.inputs) add_weight(up);
    while (down.weights < down.inputs) add_weight(down);
  }
  return schedule;
}

}  // namespace penstock
