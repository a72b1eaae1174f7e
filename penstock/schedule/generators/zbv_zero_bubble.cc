// ZBVZeroBubble: two stages a rank in a V, the backward split; with equal costs of F, I and W no rank waits between its
// first action and its last.
//
//   rank 0 | 0F0 0F1 0F2             3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
//   rank 1 |     1F0 2F0 1F1 2F1 2I0 …
//
// From Qi et al., "Pipeline Parallelism with Controllable Memory": a rank keeps as much as 1F1B's first one.
#include <algorithm>
#include <utility>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"

namespace penstock {
namespace {

// One of a rank's two stages, and the microbatches that it has had.
struct Chunk {
  int stage;
  int forwards = 0;
  int inputs = 0;
  int weights = 0;
};

}  // namespace

Schedule zbv_zero_bubble(int ranks, int microbatches) {
  const int covered = std::max(2 * ranks - 1, microbatches);
  Schedule schedule(v_placement(ranks, /*stages_per_rank=*/2), covered);
  for (int rank = 0; rank < ranks; ++rank) {
    Chunk down{.stage = rank};
    Chunk up{.stage = 2 * ranks - 1 - rank};
    const auto add_forward = [&](Chunk& chunk) { schedule.add(rank, forward(chunk.stage, chunk.forwards++)); };
    const auto add_input = [&](Chunk& chunk) { schedule.add(rank, input_backward(chunk.stage, chunk.inputs++)); };
    const auto add_weight = [&](Chunk& chunk) { schedule.add(rank, weight_backward(chunk.stage, chunk.weights++)); };

    // The V fills: forwards down, until the first of them comes up again.
    for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) add_forward(down);
    // Forwards both ways.
    for (int i = 0; i < rank; ++i) {
      add_forward(up);
      add_forward(down);
    }
    // The way up turns at the last stage; backwards begin.
    for (int i = 0; i < ranks - rank; ++i) {
      add_forward(up);
      add_input(up);
      add_weight(up);
    }
    // The steady state: all six.
    while (up.forwards < down.forwards || down.forwards < covered) {
      if (down.forwards < covered) add_forward(down);
      add_input(down);
      add_weight(down);
      add_forward(up);
      add_input(up);
      add_weight(up);
    }
    // Input gradients first, for the ranks that wait for them.
    for (int i = 0; i < rank; ++i) {
      add_input(down);
      add_input(up);
    }
    for (int i = 0; i < ranks - rank; ++i) {
      add_input(down);
      add_weight(down);
    }
    // The weight gradients that were left for the end.
    while (up.weights < up.inputs) add_weight(up);
    while (down.weights < down.inputs) add_weight(down);
  }
  return keep_microbatches(std::move(schedule), microbatches);
}

}  // namespace penstock
