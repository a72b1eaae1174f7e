// DualPipeV: two stages per rank in a V placement, with forwards and backwards of different microbatches in overlapped
// pairs.
//
//   rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1---- 3F2 0B0---- 0F4 3B2---- 3F3 0B1---- 3B3---- 3F4     0B2---- 3B4---- 0I3 0W3 0I4 0W4
//   rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0---- 2F2 1B0---- 1F3 2B1---- 2F3 1B1---- 1F4 2B2---- 2F4 1B2---- 2B3---- 1B3---- 2I4 1I4 2W4 1W4
//
// On a device that computes and communicates at the same time, the communication of one part of a pair overlaps with
// the computation of the other. From DeepSeek's DualPipeV, whose eight phases are those below.
#include <algorithm>
#include <deque>

#include "penstock/schedule/generators.h"

namespace penstock {
namespace {

// One of a rank's two stages, with the number of microbatches that have run so far.
struct Chunk {
  int stage;
  int forwards = 0;
  int backwards = 0;

  Action next_forward() { return forward(stage, forwards++); }
  Action next_backward() { return full_backward(stage, backwards++); }
  Action next_input() { return input_backward(stage, backwards++); }
};

}  // namespace

Schedule dual_pipe_v(int ranks, int microbatches) {
  const int covered = std::max(2 * ranks, microbatches);
  Schedule schedule(v_placement(ranks, /*stages_per_rank=*/2), microbatches);
  for (int rank = 0; rank < ranks; ++rank) {
    Chunk down{.stage = rank};
    Chunk up{.stage = 2 * ranks - 1 - rank};
    const int after = ranks - 1 - rank;
    std::deque<Action> weights;
    const auto exists = [&](const Action& action) { return action.microbatch < microbatches; };
    const auto add = [&](const Action& action) {
      if (exists(action)) schedule.add(rank, action);
    };
    const auto add_input = [&](Chunk& chunk) {
      const Action input = chunk.next_input();
      weights.push_back(weight_backward(input.stage, input.microbatch));
      add(input);
    };
    const auto add_weight = [&] {
      if (weights.empty()) return;
      add(weights.front());
      weights.pop_front();
    };
    const auto add_pair = [&](Chunk& forwards, Chunk& backwards) {
      const Action first = forwards.next_forward();
      const Action second = backwards.next_backward();
      if (exists(first) && exists(second)) {
        add(overlap(first, second));
      } else {
        add(first);
        add(second);
      }
    };

    // 1: forwards of the first stage.
    for (int i = 0; i < 2 * after; ++i) add(down.next_forward());
    // 2: forwards of both stages.
    for (int i = 0; i <= rank; ++i) {
      add(down.next_forward());
      add(up.next_forward());
    }
    // 3: the first backwards of the second stage, split.
    for (int i = 0; i < after; ++i) {
      add_input(up);
      add_weight();
      add(up.next_forward());
    }
    // 4: steady state, in pairs. The first two computations of the last rank are no pair, as its backward needs the
    // result of the forward.
    for (int i = 0; i < covered - 2 * ranks + rank + 1; ++i) {
      if (i == 0 && rank == ranks - 1) {
        add(down.next_forward());
        add(up.next_backward());
      } else {
        add_pair(down, up);
      }
      add_pair(up, down);
    }
    // 5: the first stage has run all forwards.
    for (int i = 0; i < after; ++i) {
      add(up.next_backward());
      add_pair(up, down);
    }
    // 6: backwards of both stages; the later half defers its weight gradients.
    bool split = false;
    const auto add_backward = [&](Chunk& chunk) {
      if (split) {
        add_input(chunk);
      } else {
        add(chunk.next_backward());
      }
    };
    const int half = (rank + 1) / 2;
    for (int i = 0; i <= rank; ++i) {
      split |= i == half && rank % 2 == 1;
      add_backward(up);
      split |= i == half && rank % 2 == 0;
      add_backward(down);
    }
    // 7: the last backwards of the first stage, with deferred weight gradients in between.
    for (int i = 0; i < after; ++i) {
      add_weight();
      add_backward(down);
    }
    // 8: the remaining weight gradients.
    while (!weights.empty()) add_weight();
  }
  return schedule;
}

}  // namespace penstock
