// The schedules that can be made: one function each, in a file of its own with its picture, and all of them by name.
// They make computations only; `lower` adds the rest.
//
// Orders are those of torch.distributed.pipelining for the parameters that it accepts. Any other number of microbatches
// gets the schedule of the next number that the rule covers, without the microbatches that are not there: taking
// actions out of lists delays none of the others.
//
//   Schedule schedule = interleaved_1f1b(/*ranks=*/4, /*stages_per_rank=*/2, /*microbatches=*/8);
//   Schedule same = generate("interleaved1f1b", {.ranks = 4, .stages_per_rank = 2, .microbatches = 8});
#pragma once

#include <span>
#include <string_view>

#include "penstock/schedule/schedule.h"

namespace penstock {

Schedule forward_only(int ranks, int stages_per_rank, int microbatches);
Schedule gpipe(int ranks, int microbatches);
Schedule one_f_one_b(int ranks, int microbatches);
Schedule looped_bfs(int ranks, int stages_per_rank, int microbatches);
Schedule interleaved_1f1b(int ranks, int stages_per_rank, int microbatches);
Schedule interleaved_zero_bubble(int ranks, int stages_per_rank, int microbatches);
Schedule zbv_zero_bubble(int ranks, int microbatches);
Schedule dual_pipe_v(int ranks, int microbatches);

struct Generator {
  std::string_view name;
  std::string_view summary;
  // How many stages a rank has; 0: any number, by default two.
  int stages_per_rank;
  Schedule (*make)(int ranks, int stages_per_rank, int microbatches);

  int default_stages_per_rank() const { return stages_per_rank == 0 ? 2 : stages_per_rank; }
};

std::span<const Generator> generators();

// By name, without regard to case. Throws ScheduleError, with the nearest name.
const Generator& find_generator(std::string_view name);

struct GenerateOptions {
  int ranks = 1;
  // 0: the generator's own number.
  int stages_per_rank = 0;
  int microbatches = 1;
};

// Throws ScheduleError when a number is below 1, or the generator has another number of stages a rank.
Schedule generate(std::string_view name, const GenerateOptions& options);

// The same schedule for any placement, also of unequal numbers of stages a rank: made on the generator's own placement
// and moved.
Schedule generate(std::string_view name, const Placement& placement, int microbatches);

}  // namespace penstock
