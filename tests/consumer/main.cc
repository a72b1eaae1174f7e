// Generates, lowers, verifies and simulates a schedule, and prints its makespan.
#include <cstdlib>
#include <iostream>

#include "penstock/schedule/error.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"

int main() {
  try {
    const penstock::Schedule schedule = penstock::generate("1F1B", {.ranks = 4, .microbatches = 8});
    const penstock::Schedule lowered = penstock::lower(schedule);
    penstock::require_valid(lowered);
    std::cout << "1F1B, 4 ranks, 8 microbatches: makespan " << penstock::simulate(lowered).makespan << "\n";
  } catch (const penstock::ScheduleError& error) {
    std::cerr << error.what() << "\n";
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
