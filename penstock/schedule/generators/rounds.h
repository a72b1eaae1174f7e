// Arithmetic of the interleaved schedules: microbatches pass through all stages of a rank in rounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace penstock::internal {

// Returns the smallest number, at least `microbatches`, that can be divided into equal rounds of at least `ranks`.
inline int next_equal_rounds(int ranks, int microbatches) {
  while (microbatches % std::max(1, microbatches / ranks) != 0) ++microbatches;
  return microbatches;
}

// Maps a rank's k-th forward or backward to its stage.
class Rounds {
 public:
  // `microbatches` must be a result of next_equal_rounds.
  Rounds(int ranks, int stages_per_rank, int microbatches)
      : ranks_(ranks),
        stages_per_rank_(stages_per_rank),
        microbatches_(microbatches),
        per_round_(microbatches / std::max(1, microbatches / ranks)) {}

  // Returns the number of forwards of a rank, which is also the number of its backwards.
  int total() const { return microbatches_ * stages_per_rank_; }
  // Returns the number of forwards of a rank before its first backward; each rank has `per_hop` more than the next one.
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

// Returns the next microbatch of each stage, for one kind of computation.
class MicrobatchCounter {
 public:
  explicit MicrobatchCounter(int stages) : next_(static_cast<std::size_t>(stages), 0) {}
  int next(int stage) { return next_[static_cast<std::size_t>(stage)]++; }

 private:
  std::vector<int> next_;
};

}  // namespace penstock::internal
