// The interface between Penstock and the plugins with device backends, such as libpenstock_nccl.so, which it loads on
// use.
#pragma once

#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace penstock::internal {

// Returns a backend of `size` ranks for tensors on the device with this index. All ranks have connected. The caller owns
// a reference to it. Throws std::runtime_error.
using CreateDeviceBackend = c10d::Backend*(c10d::Store* store, int rank, int size, int device_index);
// Sets `id` to a text that identifies the device among those of the machine, in all of its processes. Throws
// std::runtime_error if there is no such device, or if the plugin cannot use it.
using IdentifyDevice = void(int device_index, std::string& id);

// Names of the functions that the library exports.
inline constexpr const char* kCreateDeviceBackend = "penstock_device_backend";
inline constexpr const char* kIdentifyDevice = "penstock_device_id";

}  // namespace penstock::internal
