// Test programs on the simulated accelerator link simulation_main.cc.
#pragma once

#include "tests/device/sim/sim_device.h"

namespace penstock::internal::testing {

// Called before the first test, when the device has been registered. Each program defines it.
void begin_on_simulation();

}  // namespace penstock::internal::testing
