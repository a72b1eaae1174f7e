// What the interleaved schedules have in common: rounds of microbatches that go through all of a rank's stages, and the
// stage that a rank's k-th forward or backward belongs to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace penstock::internal {

// The smallest number of microbatches from `microbatches` on that falls into equal rounds of at least `ranks`.
inline int next_equal_rounds(int ranks, int microbatches) {
  while (microbatches % std::max(1, microbatches / ranks) != 0) ++microbatches;
  return microbatches;
}

class Rounds {
 public:
  // `microbatches` is one that next_equal_rounds gives.
  Rounds(int ranks, int stages_per_rank, int microbatches)
      : ranks_(ranks),
        stages_per_rank_(stages_per_rank),
        microbatches_(microbatches),
        per_round_(microbatches / std::max(1, microbatches / ranks)) {}

  // Forwards of a rank, and backwards.
  int total() const { return microbatches_ * stages_per_rank_; }
  // Forwards of the last rank before its first backward, and `per_hop` more for each rank before it.
  int warmup(int rank, int per_hop) const {
    return std::min((stages_per_rank_ - 1) * per_round_ + per_hop * (ranks_ - 1 - rank), total());
  }
  int forward_stage(int rank, int k) const { return turn(k) * ranks_ + rank; }
  int backward_stage(int rank, int k) const { return (stages_per_rank_ - 1 - turn(k)) * ranks_ + rank; }

 private:
  int turn(int k) const { return k / per_round_ % stages_per_rank_; }

  int ranks_;
  int stages_per_rank_;
  int microbatches_;
  int per_round_;
};

// Counts the microbatches that a stage has had, for one kind of computation.
class MicrobatchCounter {
 public:
  explicit MicrobatchCounter(int stages) : next_(static_cast<std::size_t>(stages), 0) {}
  int next(int stage) { return next_[static_cast<std::size_t>(stage)]++; }

 private:
  std::vector<int> next_;
};

}  // namespace penstock::internal
