// The main function of test programs on the simulated accelerator. A race fails the test in which it was found.
#include "tests/device/simulation_main.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/device/test_devices.h"

namespace {

class Races : public ::testing::EmptyTestEventListener {
 public:
  void OnTestEnd(const ::testing::TestInfo& /*info*/) override {
    for (const std::string& race : penstock::sim::take_races()) ADD_FAILURE() << race;
  }
};

}  // namespace

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  // The race detector looks at the order of calls, so that it needs no long delays.
  penstock::sim::install({.devices = 4, .max_delay_us = 20});
  // As the kernels of the device, so that results on the CPU are bitwise the same.
  at::set_num_threads(1);
  penstock::internal::testing::host_waits_function() = []() -> std::uint64_t {
    return penstock::sim::counters().host_waits;
  };
  penstock::internal::testing::begin_on_simulation();
  ::testing::UnitTest::GetInstance()->listeners().Append(new Races);
  return RUN_ALL_TESTS();
}
