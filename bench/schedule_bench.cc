// Penstock's part of bench/schedule.py. Reads a measurement from each line of standard input and prints a line of
// results.
//
//   lower RANKS STAGES_PER_RANK MICROBATCHES      seconds to generate and lower Interleaved1F1B
//   simulate RANKS STAGES_PER_RANK MICROBATCHES   seconds to simulate it lowered, actions, the process's peak memory
#include <sys/resource.h>

#include <cstddef>
#include <iostream>
#include <string>

#include "bench/answering.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"

namespace penstock::internal::bench {
namespace {

using bench::seconds;

std::size_t peak_memory() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::size_t>(usage.ru_maxrss) * 1024;
}

int answer_questions() {
  std::string measurement;
  int ranks = 0;
  int stages_per_rank = 0;
  int microbatches = 0;
  while (std::cin >> measurement >> ranks >> stages_per_rank >> microbatches) {
    if (measurement == "lower") {
      std::cout << seconds([&] { lower(interleaved_1f1b(ranks, stages_per_rank, microbatches)); }) << std::endl;
    } else if (measurement == "simulate") {
      const Schedule lowered = lower(interleaved_1f1b(ranks, stages_per_rank, microbatches));
      const double time = seconds([&] { simulate(lowered); });
      std::cout << time << " " << lowered.size() << " " << peak_memory() << std::endl;
    } else {
      std::cerr << "'" << measurement << "' is neither lower nor simulate\n";
      return 2;
    }
  }
  return 0;
}

}  // namespace
}  // namespace penstock::internal::bench

int main() {
  return penstock::internal::bench::run(penstock::internal::bench::answer_questions);
}
