// The option --device-transport: how process ranks send tensors on devices to each other.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "penstock/device/device_list.h"
#include "penstock/transport/c10d.h"

namespace penstock::internal::cli {

struct DeviceTransportOption {
  std::string text = "auto";

  void add_to(CLI::App& command);
  // Throws DeviceError if "direct" does not apply: to thread ranks, or to the CPU.
  void require_possible(const DeviceList& devices, bool are_process_ranks) const;
  // Returns options with the device transport of this process rank, whose device is the first of the list. Loads the
  // plugin of its type. When the ranks have chosen, rank 0 prints how to standard error.
  C10dOptions options(const DeviceList& devices) const;
};

}  // namespace penstock::internal::cli
