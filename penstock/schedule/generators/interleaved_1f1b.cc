// Interleaved1F1B: 1F1B over several stages per rank, in rounds of microbatches.
//
//   rank 0 | 0F0 0F1 2F0 2F1 0F2     2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1----     2B2----     2B3---- 0B2---- 0B3----
//   rank 1 |     1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- 1B2---- 1B3----
//
// The bubble is that of 1F1B divided by the number of stages per rank, at the price of more messages and more saved
// activations. From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters".
#include <utility>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/generators/rounds.h"
#include "penstock/schedule/passes.h"

namespace penstock {

using internal::MicrobatchCounter;
using internal::next_equal_rounds;
using internal::Rounds;

Schedule interleaved_1f1b(int ranks, int stages_per_rank, int microbatches) {
  const int covered = next_equal_rounds(ranks, microbatches);
  Schedule schedule(loop_placement(ranks, stages_per_rank), covered);
  const Rounds rounds(ranks, stages_per_rank, covered);
  for (int rank = 0; rank < ranks; ++rank) {
    schedule.reserve(rank, 2 * static_cast<std::size_t>(rounds.total()));
    MicrobatchCounter forwards(schedule.stages());
    MicrobatchCounter backwards(schedule.stages());
    const int warmup = rounds.warmup(rank, /*per_hop=*/2);
    for (int k = 0; k < rounds.total() + warmup; ++k) {
      if (k < rounds.total()) {
        const int stage = rounds.forward_stage(rank, k);
        schedule.add(rank, forward(stage, forwards.next(stage)));
      }
      if (k >= warmup) {
        const int stage = rounds.backward_stage(rank, k - warmup);
        schedule.add(rank, full_backward(stage, backwards.next(stage)));
      }
    }
  }
  return keep_microbatches(std::move(schedule), microbatches);
}

}  // namespace penstock
