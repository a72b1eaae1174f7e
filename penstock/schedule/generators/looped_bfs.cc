// LoopedBFS: stage by stage, each for the whole batch; then back, last microbatch first.
//
//   rank 0 | 0F0 0F1 2F0 2F1             2B1---- 2B0---- 0B1---- 0B0----
//   rank 1 |     1F0 1F1 3F0 3F1 3B1---- 3B0---- 1B1---- 1B0----
//
// A stage's parameters are needed in two stretches only, which suits sharded ones; all activations are alive at the
// turn.
#include "penstock/schedule/generators.h"

namespace penstock {

Schedule looped_bfs(int ranks, int stages_per_rank, int microbatches) {
  Schedule schedule(loop_placement(ranks, stages_per_rank), microbatches);
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    for (int mb = 0; mb < microbatches; ++mb) schedule.add(stage % ranks, forward(stage, mb));
  }
  for (int stage = schedule.stages() - 1; stage >= 0; --stage) {
    for (int mb = microbatches - 1; mb >= 0; --mb) schedule.add(stage % ranks, full_backward(stage, mb));
  }
  return schedule;
}

}  // namespace penstock
