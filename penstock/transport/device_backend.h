// Messages of process ranks from device to device, without a copy in CPU memory: which backend they take, and whether
// they are possible. The backends are in plugin libraries that are loaded on use, so that one build of Penstock serves
// the CPU build of libtorch and those for accelerators.
//
//   penstock::load_accelerator();                               // before the first use of libtorch
//   const penstock::Rendezvous place = penstock::rendezvous();
//   const at::Device device(at::kCUDA, static_cast<at::DeviceIndex>(place.local_rank));
//   auto transport = penstock::c10d_transport(place, {.device_backends = penstock::device_backends(device)});
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "penstock/transport/device_backend_factory.h"

namespace penstock {

// A way of tensors on devices between process ranks.
enum class DeviceTransport {
  // Takes Direct if it is possible on all ranks and each has a device of its own, otherwise Staged.
  Auto,
  // Sends them from device to device.
  Direct,
  // Copies them to pinned CPU memory, and sends them from there.
  Staged,
};

// The backends for tensors on the device of a rank.
struct DeviceBackends {
  // Empty if tensors on this device cannot be sent directly.
  DeviceBackendFactory create = {};
  // Identifies the device among those of all machines: ranks with the same id share a device, which Direct does not
  // allow. Ranks with an empty id are not compared.
  std::string device_id = {};
  // Explains why `create` is empty, in sentences with a hint.
  std::string reason = {};
};

// Loads the plugin for the type of a device: for CUDA, libpenstock_nccl.so from the path in PENSTOCK_NCCL_PLUGIN if it
// is set, otherwise from the first of these that has it: the directory of the library or executable that contains this
// function, the directory of the executable, ../lib/penstock relative to that, the directory that Penstock is installed
// to, and the search path of the dynamic linker. Calls load_accelerator(). A plugin stays loaded. Thread-safe.
//
// A plugin that is missing or does not fit to libtorch, and a device that does not exist, are reasons in the result. The id is
// empty if the device has no index, as at::kCUDA alone.
DeviceBackends device_backends(at::Device device);

// Loads libtorch's library for accelerators, if it is in the directory of libtorch_cpu.so. A program that was linked
// with the CPU build of libtorch does not load it otherwise, and sees no devices. Call this before the first use of
// libtorch: a late call succeeds, and at::hasCUDA() may remain false. Thread-safe.
//
// Throws std::runtime_error if the library exists and cannot be loaded.
void load_accelerator();

}  // namespace penstock
