// The interface between Penstock and libpenstock_nccl.so, the library that it loads on use.
#pragma once

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace penstock::internal {

// Returns a backend of `size` ranks for tensors on the device with this index. All ranks have connected. The caller owns
// a reference to it. Throws std::runtime_error.
using CreateDeviceBackend = c10d::Backend*(c10d::Store* store, int rank, int size, int device_index);

// Name of the function that the library exports.
inline constexpr const char* kCreateDeviceBackend = "penstock_device_backend";

}  // namespace penstock::internal
