// Process ranks that penstock_launch has started, on the CPU or on simulated devices of their own. In a suite on devices,
// PENSTOCK_TEST_CARRIER=direct sends tensors from device to device, and otherwise they are staged in CPU memory.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "penstock/transport/c10d.h"
#include "tests/device/test_devices.h"
#include "tests/transport/device/device_ranks.h"

namespace penstock::internal::testing {

inline DeviceCarrier carrier_of_environment() {
  const char* const carrier = std::getenv("PENSTOCK_TEST_CARRIER");
  return carrier != nullptr && carrier == std::string("direct") ? DeviceCarrier::Direct : DeviceCarrier::Staged;
}

inline std::shared_ptr<Transport> new_transport(const C10dOptions& options = {}) {
  static const Rendezvous kPlace = rendezvous();
  return c10d_transport(kPlace, is_on_devices() ? options_of(carrier_of_environment(), options) : options);
}

// Returns the transport that tests share: several pipelines may use it one after the other.
inline const std::shared_ptr<Transport>& world() {
  static const std::shared_ptr<Transport> kTransport = new_transport();
  return kTransport;
}

// Tests that all processes run at the same time.
class ProcessRanks : public ::testing::Test {
 protected:
  void TearDown() override {
    // The other processes would wait for a rank that leaves a test early.
    if (HasFailure()) world()->abort("a test has failed in rank " + std::to_string(world()->rank()));
  }
  static int ranks() { return world()->ranks(); }
};

// Returns true for the longer grids of `make soak`.
inline bool runs_whole_grid() {
  const char* const grid = std::getenv("PENSTOCK_GRID");
  return grid != nullptr && grid == std::string("whole");
}

}  // namespace penstock::internal::testing
