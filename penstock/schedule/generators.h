// Generators of the known pipeline schedules. Each is a function in a source of its own, below a picture of its
// schedule; all of them are also available by name. Generated schedules contain computations only; `lower` adds the
// rest.
//
// The order of actions is that of torch.distributed.pipelining for all parameters that it accepts. For any other number
// of microbatches, the generator makes the schedule for the next number that its rule covers and leaves the surplus
// microbatches out, which delays none of the remaining actions.
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
  // Number of stages per rank; 0 if the generator accepts any number.
  int stages_per_rank;
  Schedule (*make)(int ranks, int stages_per_rank, int microbatches);

  int default_stages_per_rank() const { return stages_per_rank == 0 ? 2 : stages_per_rank; }
};

// Returns all generators.
std::span<const Generator> generators();

// Finds a generator by its name, ignoring case. Throws ScheduleError with the most similar name.
const Generator& find_generator(std::string_view name);

struct GenerateOptions {
  int ranks = 1;
  // 0 selects the generator's default.
  int stages_per_rank = 0;
  int microbatches = 1;
};

// Generates a schedule by name. Throws ScheduleError if the name is unknown, a number is below 1, or the generator does
// not accept that number of stages per rank.
Schedule generate(std::string_view name, const GenerateOptions& options);

// Generates a schedule by name for any placement, even with unequal numbers of stages per rank: the schedule is made
// for the generator's own placement and then moved with `place`.
Schedule generate(std::string_view name, const Placement& placement, int microbatches);

}  // namespace penstock
