// The allocators of device memory and of pinned memory, as c10 and ATen see them.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

namespace penstock::sim {

c10::DeviceAllocator& device_allocator();
at::HostAllocator& pinned_allocator();

}  // namespace penstock::sim
