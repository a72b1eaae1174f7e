// Puts faults into the code for devices, and shows that the simulated device finds each of them.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "penstock/device/faults.h"
#include "penstock/runtime/pipeline.h"
#include "penstock/schedule/generators.h"
#include "tests/device/sim/sim_device.h"
#include "tests/runtime/models.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

constexpr int kRanks = 2;

StageDevices one_for_each_stage() {
  return [](int stage) { return at::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stage)); };
}

// Has a fault while it lives.
class Injected {
 public:
  explicit Injected(Fault fault) { injected_fault = fault; }
  ~Injected() { injected_fault = Fault::None; }
  Injected(const Injected&) = delete;
  Injected& operator=(const Injected&) = delete;
};

// Trains for some steps, and returns the races.
std::vector<std::string> races_on_threads() {
  const Schedule schedule = generate("1F1B", {.ranks = kRanks, .microbatches = 4});
  const Model model = perceptron(kRanks, one_for_each_stage());
  Pipeline pipeline(model.build(), schedule, {.loss = squared_error});
  for (int step = 0; step < 3; ++step) pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  return sim::take_races();
}

std::vector<std::string> races_on_processes() {
  const Schedule schedule = generate("1F1B", {.ranks = kRanks, .microbatches = 4});
  World world(Carrier::Gloo, kRanks);
  on_threads(kRanks, [&](int rank) {
    const Model model = perceptron(kRanks, one_for_each_stage());
    // The world keeps its transports.
    const std::shared_ptr<Transport> transport(&world[rank], [](Transport*) {});
    Pipeline pipeline(model.build({rank}), schedule, {.transport = transport, .loss = squared_error});
    for (int step = 0; step < 3; ++step) pipeline.step({rows(8, "x")}, {}, rows(8, "y"));
  });
  return sim::take_races();
}

TEST(DeviceFaults, AreNotThereUnlessInjected) {
  EXPECT_EQ(races_on_threads(), std::vector<std::string>());
  EXPECT_EQ(races_on_processes(), std::vector<std::string>());
}

std::string name_of_fault(const ::testing::TestParamInfo<Fault>& info) {
  switch (info.param) {
    case Fault::CopyWithoutEvent: return "CopyWithoutEvent";
    case Fault::UseBeforeCopy: return "UseBeforeCopy";
    default: return "EarlyFree";
  }
}
class EveryFault : public ::testing::TestWithParam<Fault> {};
INSTANTIATE_TEST_SUITE_P(DeviceFaults, EveryFault,
                         ::testing::Values(Fault::CopyWithoutEvent, Fault::UseBeforeCopy, Fault::EarlyFree),
                         name_of_fault);

TEST_P(EveryFault, IsARaceOnThreadRanks) {
  const Injected fault(GetParam());
  EXPECT_FALSE(races_on_threads().empty());
}

TEST_P(EveryFault, IsARaceOnProcessRanks) {
  const Injected fault(GetParam());
  EXPECT_FALSE(races_on_processes().empty());
}

TEST(DeviceFaultsDeathTest, SendingFromAStagingBufferTooEarlyEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto send_early = [] {
    const Injected fault(Fault::EarlySend);
    races_on_processes();
  };
  EXPECT_DEATH(send_early(), "");
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  penstock::sim::install({.devices = 2});
  return RUN_ALL_TESTS();
}
