// A Placement says which rank runs which stage.
//
//   loop_placement(2, 2)   stage 0 1 2 3 -> rank 0 1 0 1
//   v_placement(2, 2)      stage 0 1 2 3 -> rank 0 1 1 0
//   Placement({0, 0, 1})   any other, also with unequal numbers of stages a rank
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

namespace penstock {

class Placement {
 public:
  // `rank_of_stage` has a rank for each stage. The number of ranks is one more than the largest, or `ranks` if that is
  // more. Throws ScheduleError when there is no stage or a rank is negative.
  explicit Placement(std::vector<int> rank_of_stage, int ranks = 0);

  int ranks() const { return static_cast<int>(stages_of_rank_.size()); }
  int stages() const { return static_cast<int>(rank_of_stage_.size()); }
  int rank_of(int stage) const { return rank_of_stage_[static_cast<std::size_t>(stage)]; }
  // In ascending order.
  std::span<const int> stages_of(int rank) const { return stages_of_rank_[static_cast<std::size_t>(rank)]; }
  std::span<const int> ranks_by_stage() const { return rank_of_stage_; }

  friend bool operator==(const Placement&, const Placement&) = default;

 private:
  std::vector<int> rank_of_stage_;
  std::vector<std::vector<int>> stages_of_rank_;
};

// Stage s on rank s mod ranks: each rank has a stage from every turn of the loop.
Placement loop_placement(int ranks, int stages_per_rank);
// Up the ranks and down again, so that the ends of neighbouring turns lie on one rank.
Placement v_placement(int ranks, int stages_per_rank);

// The peer's names for the same: the rank of each of `stages` stages in the style "loop" (also when the ranks do not divide
// them) or "v", and the stages of each rank. Throws ScheduleError for another style, or a V that does not come out even.
std::vector<int> generate_stage_to_rank_mapping(int ranks, int stages, std::string_view style = "loop");
std::vector<std::vector<int>> generate_rank_to_stage_mapping(int ranks, int stages, std::string_view style = "loop");

}  // namespace penstock
