// 1F1B: each rank runs forwards until the first gradient can arrive, then alternates one backward and one forward.
//
//   rank 0 | 0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3----
//   rank 1 |     1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3----
//   rank 2 |         2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3----
//
// It takes as long as GPipe, but a rank saves the activations of at most as many microbatches as there are ranks from
// it to the last one.
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
