// What the tests of this room share: checks of error messages, and schedules drawn at random.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "penstock/schedule/error.h"
#include "penstock/schedule/schedule.h"

namespace penstock {

// `act` throws a ScheduleError whose message contains `words`.
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

// From PENSTOCK_SEED if it is set, else from `usual`; a failure in the test shows which.
Random seeded(unsigned usual);

inline int between(Random& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

// A chain of stages with skips and groups at random.
StageGraph random_graph(Random& random, int stages);
// Stages on ranks at random, each rank with one at least if there are enough.
Placement random_placement(Random& random, int ranks, int stages);

}  // namespace penstock
