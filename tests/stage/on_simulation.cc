// Lets the stages of the backward's tests compute on the simulated accelerator.
#include "tests/device/simulation_main.h"
#include "tests/stage/stages.h"

namespace penstock::internal::testing {

void begin_on_simulation() {
  stage_device() = at::Device(c10::kPrivateUse1, 0);
}

}  // namespace penstock::internal::testing
