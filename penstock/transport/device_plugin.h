// The parts of device_backend.h that can be tested without an accelerator.
#pragma once

#include <c10/core/Device.h>

#include <filesystem>

#include "penstock/transport/device_backend.h"

namespace penstock::internal {

// Returns the backends of a plugin that was loaded with dlopen. Throws std::runtime_error if the library is no plugin,
// or if it cannot use the device.
DeviceBackends device_backends_of(void* plugin, at::Device device);

// Does what load_accelerator() does, for a directory.
void load_accelerator_from(const std::filesystem::path& directory);

}  // namespace penstock::internal
