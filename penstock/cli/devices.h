// The option --device, and the libraries of accelerators.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "penstock/device/device_list.h"
#include "penstock/transport/device_backend.h"

namespace penstock::internal::cli {

struct DeviceOption {
  // As given; empty for the default.
  std::string text;

  void add_to(CLI::App& command);
  // Loads libtorch's library for the devices, and returns the devices of this process: all that were given, or the one
  // of its local rank if a launcher has started it as one of several ranks. By default these are CUDA's or another
  // accelerator's devices in a rank of a launcher, if there are any, and otherwise the CPU. Call it before the first use
  // of libtorch. Throws DeviceError.
  DeviceList load() const;
};

// Loads the simulated device of the tests, libpenstock_sim.so, from the path in PENSTOCK_SIM_LIBRARY if it is set, and
// otherwise from ../lib relative to the executable or from the search path of the dynamic linker. Throws DeviceError.
void load_simulated_device();
// Returns the backends that its library exports. Requires load_simulated_device().
DeviceBackends simulated_device_backends(at::Device device);

}  // namespace penstock::internal::cli
