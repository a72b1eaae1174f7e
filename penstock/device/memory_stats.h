// Memory of tensors on a device, as its allocator counts it.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace penstock::internal {

struct DeviceMemory {
  // Bytes of tensors that are alive, and most since the last reset_peak_memory().
  std::int64_t allocated = 0;
  std::int64_t peak = 0;
};

// Requires a device with an index whose type has streams.
DeviceMemory device_memory(at::Device device);
void reset_peak_memory(at::Device device);

}  // namespace penstock::internal
