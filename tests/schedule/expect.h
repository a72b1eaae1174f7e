// Shared by the tests of the schedule layer: checks of error messages, and random graphs and placements.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "penstock/schedule/error.h"
#include "penstock/schedule/schedule.h"

namespace penstock::internal::testing {

// Expects that `act` throws a ScheduleError whose message contains `words`.
template <class Act>
void expect_error(const Act& act, const std::string& words) {
  try {
    act();
    ADD_FAILURE() << "no error, instead of: " << words;
  } catch (const ScheduleError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos)
        << "message: " << error.what() << "\nwanted:  " << words;
  }
}

using Random = std::mt19937;

// Returns a generator with the seed PENSTOCK_SEED if it is set, else `default_seed`, and prints the seed.
Random seeded(unsigned default_seed);

inline int between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// Returns a chain of stages with random skip connections and groups.
StageGraph random_graph(Random& random, int stages);
// Returns a random placement in which each rank has a stage if there are enough.
Placement random_placement(Random& random, int ranks, int stages);

}  // namespace penstock::internal::testing
