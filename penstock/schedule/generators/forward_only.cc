// ForwardOnly: forwards only, in rounds of microbatches if a rank has several stages.
//
//   rank 0 | 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
//   rank 1 |     1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3
//
// For inference and evaluation. A round has at least as many microbatches as there are ranks, if there are that many,
// so that a microbatch returns to a rank before the rank needs it.
#include <algorithm>

#include "penstock/schedule/generators.h"

namespace penstock {

Schedule forward_only(int ranks, int stages_per_rank, int microbatches) {
  Schedule schedule(loop_placement(ranks, stages_per_rank), microbatches);
  const int rounds = std::max(1, microbatches / ranks);
  for (int round = 0; round < rounds; ++round) {
    const int begin = static_cast<int>(static_cast<long long>(microbatches) * round / rounds);
    const int end = static_cast<int>(static_cast<long long>(microbatches) * (round + 1) / rounds);
    for (int stage = 0; stage < schedule.stages(); ++stage) {
      for (int mb = begin; mb < end; ++mb) schedule.add(stage % ranks, forward(stage, mb));
    }
  }
  return schedule;
}

}  // namespace penstock
