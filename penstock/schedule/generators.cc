#include "penstock/schedule/generators.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "penstock/schedule/error.h"
#include "penstock/base/nearest.h"
#include "penstock/schedule/passes.h"

namespace penstock {
namespace {

constexpr std::array kGenerators = {
    Generator{"GPipe", "every forward, then every backward", 1, [](int p, int, int m) { return gpipe(p, m); }},
    Generator{"1F1B", "one backward for each forward once the pipeline is full", 1,
              [](int p, int, int m) { return one_f_one_b(p, m); }},
    Generator{"LoopedBFS", "stage by stage for the whole batch, then back", 0, looped_bfs},
    Generator{"Interleaved1F1B", "1F1B over several stages a rank: a shorter bubble, more messages", 0,
              interleaved_1f1b},
    Generator{"InterleavedZeroBubble", "the same, with weight gradients in the gaps", 0, interleaved_zero_bubble},
    Generator{"ZBVZeroBubble", "a V of two stages a rank: no gaps when F, I and W cost the same", 2,
              [](int p, int, int m) { return zbv_zero_bubble(p, m); }},
    Generator{"DualPipeV", "a V of two stages a rank, forwards and backwards in overlapped pairs", 2,
              [](int p, int, int m) { return dual_pipe_v(p, m); }},
    Generator{"ForwardOnly", "forwards alone, for inference", 0, forward_only},
};

void require_positive(int number, const std::string& what) {
  if (number < 1)
    throw ScheduleError("a schedule needs at least one " + what + ", not " + std::to_string(number) + ".");
}

// Lists beyond this would not fit into the memory of any machine that we know; indices must fit into 32 bits.
void require_reasonable(int ranks, int stages_per_rank, int microbatches) {
  constexpr double kMost = 1 << 30;
  const double forwards = 1.0 * ranks * stages_per_rank * microbatches;
  if (forwards <= kMost) return;
  throw ScheduleError("a schedule of " + std::to_string(ranks) + " ranks, " + std::to_string(stages_per_rank) +
                      " stages a rank and " + std::to_string(microbatches) +
                      " microbatches is too large: it may have 2^30 forwards at most.");
}

}  // namespace

std::span<const Generator> generators() {
  return kGenerators;
}

const Generator& find_generator(std::string_view name) {
  const auto* const found = std::find_if(kGenerators.begin(), kGenerators.end(), [&](const Generator& generator) {
    return lower_case(generator.name) == lower_case(name);
  });
  if (found != kGenerators.end()) return *found;

  std::vector<std::string> names;
  for (const Generator& generator : kGenerators) names.emplace_back(generator.name);
  std::string message = "there is no schedule '" + std::string(name) + "'.\n  Hint: ";
  if (const auto near = nearest(name, names)) {
    message += "did you mean " + *near + "?";
  } else {
    message += "the schedules are ";
    for (const std::string& candidate : names) message += candidate + (candidate == names.back() ? "." : ", ");
  }
  throw ScheduleError(message);
}

Schedule generate(std::string_view name, const GenerateOptions& options) {
  const Generator& generator = find_generator(name);
  require_positive(options.ranks, "rank");
  require_positive(options.microbatches, "microbatch");
  const int stages_per_rank =
      options.stages_per_rank == 0 ? generator.default_stages_per_rank() : options.stages_per_rank;
  require_positive(stages_per_rank, "stage a rank");
  if (generator.stages_per_rank != 0 && stages_per_rank != generator.stages_per_rank) {
    throw ScheduleError(std::string(generator.name) + " has " +
                        (generator.stages_per_rank == 1 ? "one stage" : "two stages") + " a rank, not " +
                        std::to_string(stages_per_rank) +
                        ".\n  Hint: LoopedBFS, Interleaved1F1B and InterleavedZeroBubble take any number.");
  }
  require_reasonable(options.ranks, stages_per_rank, options.microbatches);
  return generator.make(options.ranks, stages_per_rank, options.microbatches);
}

Schedule generate(std::string_view name, const Placement& placement, int microbatches) {
  const Generator& generator = find_generator(name);
  require_positive(microbatches, "microbatch");
  // One stage a rank is a chain of as many ranks as there are stages; two are half as many; any number a rank fills the
  // ranks that there are.
  const auto divided = [](int stages, int by) { return (stages + by - 1) / by; };
  const int ranks =
      generator.stages_per_rank == 0 ? placement.ranks() : divided(placement.stages(), generator.stages_per_rank);
  require_reasonable(ranks, divided(placement.stages(), ranks), microbatches);
  Schedule whole = generator.make(ranks, divided(placement.stages(), ranks), microbatches);
  if (whole.placement() == placement) return whole;
  return place(keep_stages(std::move(whole), placement.stages()), placement);
}

}  // namespace penstock
