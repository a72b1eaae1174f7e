#include "penstock/device/memory_stats.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

namespace penstock::internal {

DeviceMemory device_memory(at::Device device) {
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto& bytes = stats.allocated_bytes[static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
  return {.allocated = bytes.current, .peak = bytes.peak};
}

void reset_peak_memory(at::Device device) {
  at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

}  // namespace penstock::internal
