// GPipe: each rank runs all forwards, then all backwards.
//
//   rank 0 | 0F0 0F1 0F2                         0B0---- 0B1---- 0B2----
//   rank 1 |     1F0 1F1 1F2             1B0---- 1B1---- 1B2----
//   rank 2 |         2F0 2F1 2F2 2B0---- 2B1---- 2B2----
//
// The simplest schedule. Each rank saves the activations of the whole batch before its first backward.
#include "penstock/schedule/generators.h"

namespace penstock {

Schedule gpipe(int ranks, int microbatches) {
  Schedule schedule(loop_placement(ranks, /*stages_per_rank=*/1), microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int mb = 0; mb < microbatches; ++mb) schedule.add(rank, forward(rank, mb));
    for (int mb = 0; mb < microbatches; ++mb) schedule.add(rank, full_backward(rank, mb));
  }
  return schedule;
}

}  // namespace penstock
