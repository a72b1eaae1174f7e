// The devices of a test suite. A suite whose program links test_devices_main.cc runs on the CPU, and with
// PENSTOCK_TEST_DEVICES=2 in the environment on two simulated devices: stage i is on device i modulo 2. Its models and
// comparisons ask here for the device of a stage, so that the same cases run on both.
#pragma once

#include <c10/core/Device.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace penstock::internal::testing {

// Returns the number of simulated devices on which the suite runs, or 0 on the CPU.
inline int test_device_count() {
  static const int count = [] {
    const char* const text = std::getenv("PENSTOCK_TEST_DEVICES");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  return count;
}

inline bool is_on_devices() {
  return test_device_count() > 0;
}

// True once the simulation has been installed, which is after the constructors of static objects.
inline bool& has_devices() {
  static bool installed = false;
  return installed;
}

// Returns the device of a stage, as a function that a model takes. Static objects get the CPU.
inline at::Device test_device(int stage) {
  if (!has_devices()) return at::kCPU;
  return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(stage % test_device_count())};
}

// Returns a message without the devices of its tensors, which it does not name on the CPU.
inline std::string without_devices(std::string text) {
  for (std::size_t at = text.find(" on sim:"); at != std::string::npos; at = text.find(" on sim:")) text.erase(at, 9);
  return text;
}

// Returns how often the host has waited for a device. The simulation sets the function.
inline std::uint64_t (*&host_waits_function())() {
  static std::uint64_t (*function)() = nullptr;
  return function;
}
inline std::uint64_t host_waits() {
  return host_waits_function() == nullptr ? 0 : host_waits_function()();
}

}  // namespace penstock::internal::testing

// Skips a case that has no meaning on devices, for a reason.
#define PENSTOCK_ON_CPU_ALONE(reason)                    \
  if (!::penstock::internal::testing::is_on_devices()) { \
  } else                                                 \
    GTEST_SKIP() << "on the CPU alone: " << (reason)
