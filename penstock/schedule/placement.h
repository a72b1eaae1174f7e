// A Placement maps each stage to the rank that runs it.
//
//   loop_placement(2, 2)   stage 0 1 2 3 -> rank 0 1 0 1
//   v_placement(2, 2)      stage 0 1 2 3 -> rank 0 1 1 0
//   Placement({0, 0, 1})   any other, even with unequal numbers of stages per rank
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace penstock {

class Placement {
 public:
  // `rank_of_stage` has a rank for each stage. The number of ranks is one more than the largest rank, or `ranks` if
  // that is more. Throws ScheduleError if there is no stage or a rank is negative.
  explicit Placement(std::vector<int> rank_of_stage, int ranks = 0);

  int ranks() const { return static_cast<int>(stages_of_rank_.size()); }
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int rank_of(int stage) const { return rank_of_stage_[static_cast<std::size_t>(stage)]; }
  // Returns the stages of a rank in ascending order.
  std::span<const int> stages_of(int rank) const { return stages_of_rank_[static_cast<std::size_t>(rank)]; }
  std::span<const int> ranks_by_stage() const { return rank_of_stage_; }

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  std::vector<int> rank_of_stage_;
  std::vector<std::vector<int>> stages_of_rank_;
};

// Places stage s on rank s mod ranks. Throws ScheduleError if a number is below 1.
Placement loop_placement(int ranks, int stages_per_rank);
// Places stages on ascending ranks, then on descending ones, and so on, so that no message is needed where the
// direction changes. Throws ScheduleError if a number is below 1.
Placement v_placement(int ranks, int stages_per_rank);

// Return the same placements under the names of torch.distributed.pipelining: the rank of each stage, and the stages of
// each rank. The style is "loop" or "v"; only a V needs a number of stages that is divisible by the number of ranks.
// Throws ScheduleError for other arguments.
std::vector<int> generate_stage_to_rank_mapping(int ranks, int stages, std::string_view style = "loop");
std::vector<std::vector<int>> generate_rank_to_stage_mapping(int ranks, int stages, std::string_view style = "loop");

}  // namespace penstock
