// The main function of suites that run on the CPU or on simulated devices: see test_devices.h. On devices, a race fails
// the test in which it was found.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/device/sim/sim_device.h"
#include "tests/device/test_devices.h"

namespace penstock::internal::testing {
namespace {

// Suites have many small steps. The detector looks at the order of calls, so it needs no long delays.
constexpr int kMaxDelayUs = 20;

class Races : public ::testing::EmptyTestEventListener {
 public:
  void OnTestEnd(const ::testing::TestInfo& /*info*/) override {
    for (const std::string& race : sim::take_races()) ADD_FAILURE() << race;
  }
};

void begin_on_devices() {
  sim::install({.devices = test_device_count(), .max_delay_us = kMaxDelayUs});
  has_devices() = true;
  // As the kernels of the device, so that results on the CPU are bitwise the same.
  at::set_num_threads(1);
  host_waits_function() = []() -> std::uint64_t { return sim::counters().host_waits; };
  ::testing::UnitTest::GetInstance()->listeners().Append(new Races);
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  // GoogleTest makes the parameters of suites, of which some are tensors.
  if (penstock::internal::testing::is_on_devices()) penstock::internal::testing::begin_on_devices();
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
