// InterleavedZeroBubble: Interleaved1F1B with split backwards, whose weight gradients fill the bubbles.
//
//   rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
//   rank 1 |     1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
//
// On rank r, weight gradients lag r input gradients behind: the last rank idles longest at the end, so it defers most.
// From Qi et al., "Zero Bubble Pipeline Parallelism".
#include <utility>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/generators/rounds.h"
#include "penstock/schedule/passes.h"

namespace penstock {

using internal::MicrobatchCounter;
using internal::next_equal_rounds;
using internal::Rounds;

Schedule interleaved_zero_bubble(int ranks, int stages_per_rank, int microbatches) {
  const int covered = next_equal_rounds(ranks, microbatches);
  Schedule schedule(loop_placement(ranks, stages_per_rank), covered);
  const Rounds rounds(ranks, stages_per_rank, covered);
  for (int rank = 0; rank < ranks; ++rank) {
    schedule.reserve(rank, 3 * static_cast<std::size_t>(rounds.total()));
    MicrobatchCounter forwards(schedule.stages());
    MicrobatchCounter inputs(schedule.stages());
    MicrobatchCounter weights(schedule.stages());
    int weights_done = 0;
    const auto add_weight = [&] {
      const int stage = rounds.backward_stage(rank, weights_done++);
      schedule.add(rank, weight_backward(stage, weights.next(stage)));
    };

    const int warmup = rounds.warmup(rank, /*per_hop=*/1);
    for (int k = 0; k < rounds.total() + warmup; ++k) {
      if (k < rounds.total()) {
        const int stage = rounds.forward_stage(rank, k);
        schedule.add(rank, forward(stage, forwards.next(stage)));
      }
      if (k >= warmup) {
        const int stage = rounds.backward_stage(rank, k - warmup);
        schedule.add(rank, input_backward(stage, inputs.next(stage)));
        if (k - warmup >= rank) add_weight();
      }
    }
    while (weights_done < rounds.total()) add_weight();
  }
  return keep_microbatches(std::move(schedule), microbatches);
}

}  // namespace penstock
