// Backends that transfer tensors from one accelerator to another without a copy in CPU memory, such as NCCL's. A backend
// is in a plugin library that is loaded on use, so that one build of Penstock serves the CPU build of libtorch and those
// for accelerators.
//
//   internal::load_accelerator();                                                     // first of all
//   const internal::DeviceBackends nccl = internal::load_device_backends(at::kCUDA);
//   if (!nccl.create) throw std::runtime_error(nccl.reason);
//   c10::intrusive_ptr<c10d::Backend> edge = nccl.create(store, rank, 2, at::Device(at::kCUDA, 0));
#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <string>

#include "penstock/transport/device_backend_factory.h"

namespace penstock::internal {

// The backends of a type of accelerator.
struct DeviceBackends {
  // Empty if this type has no plugin, the plugin is not installed, libtorch does not support the accelerator, or there
  // is none.
  DeviceBackendFactory create = {};
  // Explains why `create` is empty, in sentences with a hint.
  std::string reason = {};
};

// Loads the plugin for a type of accelerator: for CUDA, libpenstock_nccl.so from the path in PENSTOCK_NCCL_PLUGIN if it
// is set, otherwise from the first of these that has it: the directory of the library or executable that contains this
// function, the directory of the executable, ../lib/penstock relative to that, the directory that Penstock is installed
// to, and the search path of the dynamic linker. Calls load_accelerator(). A plugin stays loaded. Thread-safe.
//
// Throws std::runtime_error if a plugin exists and cannot be loaded, or if PENSTOCK_NCCL_PLUGIN names no file.
DeviceBackends load_device_backends(at::DeviceType type);
// Returns the factory of a plugin that was loaded with dlopen. Throws std::runtime_error if the library is no plugin.
DeviceBackendFactory device_backends_of(void* plugin);

// Loads libtorch's library for accelerators, if it is in the directory of libtorch_cpu.so. A program that was linked
// with the CPU build of libtorch does not load it otherwise, and sees no devices. Call this before the first use of
// libtorch: a late call succeeds, and at::hasCUDA() may remain false. Thread-safe.
//
// Throws std::runtime_error if the library exists and cannot be loaded.
void load_accelerator();
// Does the same for a directory.
void load_accelerator_from(const std::filesystem::path& directory);

}  // namespace penstock::internal
