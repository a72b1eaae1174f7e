// LoopedBFS: each stage runs the forwards of the whole batch before the next stage starts; then the backwards run in
// reverse.
//
//   rank 0 | 0F0 0F1 2F0 2F1             2B1---- 2B0---- 0B1---- 0B0----
//   rank 1 |     1F0 1F1 3F0 3F1 3B1---- 3B0---- 1B1---- 1B0----
//
// Each stage's parameters are in use in two intervals only, so sharded parameters are gathered rarely. Each rank saves
// the activations of the whole batch.
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
