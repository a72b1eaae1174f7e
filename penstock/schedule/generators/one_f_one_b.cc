// 1F1B: forwards until the first gradient can come back, then one backward for each forward.
//
//   rank 0 | 0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
//   rank 1 |     1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
//   rank 2 |         2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
//
// As long as GPipe, but a rank keeps no more activations than there are ranks from it to the last.
#include <algorithm>

#include "penstock/schedule/generators.h"

namespace penstock {

Schedule one_f_one_b(int ranks, int microbatches) {
  Schedule schedule(loop_placement(ranks, /*stages_per_rank=*/1), microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    const int warmup = std::min(microbatches, ranks - rank);
    for (int mb = 0; mb < warmup; ++mb) schedule.add(rank, forward(rank, mb));
    for (int mb = 0; mb < microbatches; ++mb) {
      schedule.add(rank, full_backward(rank, mb));
      if (warmup + mb < microbatches) schedule.add(rank, forward(rank, warmup + mb));
    }
  }
  return schedule;
}

}  // namespace penstock
