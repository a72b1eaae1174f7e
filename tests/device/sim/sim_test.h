// Devices, streams and checks for the tests of the simulated device.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "tests/device/sim/sim_device.h"

namespace penstock::sim {

inline constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

// Returns a device, and installs the simulation at the first call. PENSTOCK_SIM_SEED chooses the delays.
inline at::Device device(int index) {
  static const bool installed = [] {
    Options options;
    options.devices = 3;
    if (const char* seed = std::getenv("PENSTOCK_SIM_SEED")) options.seed = std::stoull(seed);
    std::cerr << "PENSTOCK_SIM_SEED=" << options.seed << '\n';
    install(options);
    // As the kernels of the device, so that results on the CPU are bitwise the same.
    at::set_num_threads(1);
    return true;
  }();
  (void)installed;
  return {kDeviceType, static_cast<c10::DeviceIndex>(index)};
}

inline c10::Stream new_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
}
inline c10::Stream current_stream_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
inline void synchronize(at::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// Lets a stream wait for what another one has been given until now.
inline void wait_for(const c10::Stream& waiting, const c10::Stream& awaited) {
  c10::Event event(kDeviceType);
  event.record(awaited);
  event.block(waiting);
}

// Tests start and end without races.
class SimTest : public testing::Test {
 protected:
  void SetUp() override {
    d0 = device(0);
    d1 = device(1);
    synchronize(d0);
    synchronize(d1);
    take_races();
  }
  void TearDown() override {
    synchronize(d0);
    synchronize(d1);
    for (const std::string& race : take_races()) ADD_FAILURE() << race;
  }
  at::Device d0 = at::kCPU;
  at::Device d1 = at::kCPU;
};

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << part << "' is not in:\n" << text;
}

// Succeeds if two lists of tensors are bitwise identical on the CPU.
inline testing::AssertionResult same_bits(const std::vector<at::Tensor>& found,
                                          const std::vector<at::Tensor>& expected) {
  if (found.size() != expected.size()) {
    return testing::AssertionFailure() << found.size() << " tensors; expected " << expected.size();
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    const at::Tensor a = found[i].detach().cpu();
    const at::Tensor b = expected[i].detach().cpu();
    if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
      return testing::AssertionFailure() << "tensor " << i << " is " << a.scalar_type() << a.sizes() << "; expected "
                                         << b.scalar_type() << b.sizes();
    }
    if (!at::equal(a, b) && !at::allclose(a.to(at::kDouble), b.to(at::kDouble), 0, 0, /*equal_nan=*/true)) {
      return testing::AssertionFailure() << "tensor " << i << " differs by up to "
                                         << (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
    }
  }
  return testing::AssertionSuccess();
}

}  // namespace penstock::sim
