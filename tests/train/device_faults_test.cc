// Puts faults into the checkpoints of devices, and shows that the simulated device finds each of them.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "penstock/device/faults.h"
#include "tests/device/simulation_main.h"
#include "tests/tensor/folder.h"
#include "tests/train/running_mean.h"

namespace penstock::internal::testing {
namespace {

// Trains a step beside a checkpoint, and returns the races.
std::vector<std::string> races_with(Fault fault, const MeanCase& setup) {
  const Folder folder;
  const auto trainer = mean_trainer(setup);
  trainer->step();
  injected_fault = fault;
  trainer->start_save(folder / "kept", /*keep=*/1, "{}");
  trainer->step();
  trainer->finish_save();
  injected_fault = Fault::None;
  return sim::take_races();
}

TEST(DeviceCheckpointFaults, AreRaces) {
  for (const MeanCase& setup : {MeanCase{}, MeanCase{.devices = "sim:0"}, MeanCase{.optimizer = "sgd"},
                                MeanCase{.devices = "sim", .sharded = true}}) {
    SCOPED_TRACE(setup.devices + ", " + setup.optimizer + (setup.sharded ? ", sharded" : ""));
    EXPECT_EQ(races_with(Fault::None, setup), std::vector<std::string>());
    EXPECT_FALSE(races_with(Fault::ForwardDuringCopy, setup).empty());
    EXPECT_FALSE(races_with(Fault::UpdateDuringCopy, setup).empty());
  }
}

}  // namespace

void begin_on_simulation() {}

}  // namespace penstock::internal::testing
