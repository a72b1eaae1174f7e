#include "penstock/schedule/generators.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "penstock/base/nearest.h"
#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"

namespace penstock {
namespace {

using internal::concat;

constexpr std::array kGenerators = {
    Generator{"GPipe", "every forward, then every backward", 1, [](int p, int, int m) { return gpipe(p, m); }},
    Generator{"1F1B", "one backward for each forward once the pipeline is full", 1,
              [](int p, int, int m) { return one_f_one_b(p, m); }},
    Generator{"LoopedBFS", "stage by stage for the whole batch, then back", 0, looped_bfs},
    Generator{"Interleaved1F1B", "1F1B over several stages per rank: a shorter bubble, more messages", 0,
              interleaved_1f1b},
    Generator{"InterleavedZeroBubble", "the same, with weight gradients in the bubbles", 0, interleaved_zero_bubble},
    Generator{"ZBVZeroBubble", "a V of two stages per rank: no bubbles when F, I and W cost the same", 2,
              [](int p, int, int m) { return zbv_zero_bubble(p, m); }},
    Generator{"DualPipeV", "a V of two stages per rank, forwards and backwards in overlapped pairs", 2,
              [](int p, int, int m) { return dual_pipe_v(p, m); }},
    Generator{"ForwardOnly", "forwards only, for inference", 0, forward_only},
};

void require_positive(int number, const std::string& what) {
  if (number < 1) throw ScheduleError(concat("a schedule needs at least one ", what, ", not ", number, "."));
}

// Larger schedules would not fit into memory, and their indices not into 32 bits.
void require_reasonable(int ranks, int stages_per_rank, int microbatches) {
  constexpr double kMost = 1 << 30;
  const double forwards = 1.0 * ranks * stages_per_rank * microbatches;
  if (forwards <= kMost) return;
  throw ScheduleError(concat("a schedule of ", ranks, " ranks, ", stages_per_rank, " stages per rank and ",
                             microbatches, " microbatches is too large: it may have at most 2^30 forwards."));
}

}  // namespace

std::span<const Generator> generators() {
  return kGenerators;
}

const Generator& find_generator(std::string_view name) {
  const auto* const found = std::find_if(kGenerators.begin(), kGenerators.end(), [&](const Generator& generator) {
    return internal::lower_case(generator.name) == internal::lower_case(name);
  });
  if (found != kGenerators.end()) return *found;

  std::vector<std::string> names;
  for (const Generator& generator : kGenerators) names.emplace_back(generator.name);
  const auto near = internal::nearest(name, names);
  throw ScheduleError(
      concat("there is no schedule '", name, "'.\n  Hint: ",
             near ? concat("did you mean ", *near, "?") : concat("the schedules are ", internal::join(names), ".")));
}

Schedule generate(std::string_view name, const GenerateOptions& options) {
  const Generator& generator = find_generator(name);
  require_positive(options.ranks, "rank");
  require_positive(options.microbatches, "microbatch");
  const int stages_per_rank =
      options.stages_per_rank == 0 ? generator.default_stages_per_rank() : options.stages_per_rank;
  require_positive(stages_per_rank, "stage per rank");
  if (generator.stages_per_rank != 0 && stages_per_rank != generator.stages_per_rank) {
    throw ScheduleError(concat(
        generator.name, " has ", generator.stages_per_rank == 1 ? "one stage" : "two stages", " per rank, not ",
        stages_per_rank, ".\n  Hint: use LoopedBFS, Interleaved1F1B or InterleavedZeroBubble, which take any number."));
  }
  require_reasonable(options.ranks, stages_per_rank, options.microbatches);
  return generator.make(options.ranks, stages_per_rank, options.microbatches);
}

Schedule generate(std::string_view name, const Placement& placement, int microbatches) {
  const Generator& generator = find_generator(name);
  require_positive(microbatches, "microbatch");
  // Generators with a fixed number of stages per rank run on as many ranks as the stages need; the others on all ranks
  // of the placement. Surplus stages are removed below.
  const auto ceil_div = [](int stages, int by) { return (stages + by - 1) / by; };
  const int ranks =
      generator.stages_per_rank == 0 ? placement.ranks() : ceil_div(placement.stages(), generator.stages_per_rank);
  require_reasonable(ranks, ceil_div(placement.stages(), ranks), microbatches);
  Schedule whole = generator.make(ranks, ceil_div(placement.stages(), ranks), microbatches);
  if (whole.placement() == placement) return whole;
  return place(keep_stages(std::move(whole), placement.stages()), placement);
}

}  // namespace penstock
