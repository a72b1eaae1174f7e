// Pipelines of processes with a simulated accelerator each. Run it as several ranks:
//
//   penstock_launch 2 penstock_device_launch_test
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "penstock/schedule/generators.h"
#include "penstock/transport/c10d.h"
#include "tests/device/sim/sim_device.h"
#include "tests/runtime/models.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {
namespace {

TEST(DeviceProcesses, GiveTheLossesOutputsAndGradientsOfOneProcess) {
  const Rendezvous place = rendezvous();
  for (const DeviceCarrier carrier : {DeviceCarrier::Staged, DeviceCarrier::Direct}) {
    const std::shared_ptr<Transport> transport = c10d_transport(place, options_of(carrier));
    for (const Generator& generator : generators()) {
      const Schedule schedule = generate(generator.name, {.ranks = transport->ranks(), .microbatches = 4});
      if (!features_of(schedule).backward) continue;
      for (const NamedModel& named : kModels) {
        SCOPED_TRACE(std::string(generator.name) + ", " + name_of(carrier));
        const bool is_random = std::string(named.name) == "transformer";
        expect_what_one_process_gives(named, schedule,
                                      {.transport = transport,
                                       .devices = [](int) { return sim_device(0); },
                                       .reference = is_random ? sim_device(0) : at::Device(at::kCPU)});
        if (!HasFailure()) continue;
        // The other processes would wait for a rank that leaves the test early.
        transport->abort("a test has failed in rank " + std::to_string(transport->rank()));
        return;
      }
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  ::testing::UnitTest::GetInstance()->listeners().Append(new penstock::internal::testing::Simulation);
  return RUN_ALL_TESTS();
}
