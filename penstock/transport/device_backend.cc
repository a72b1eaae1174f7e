#include "penstock/transport/device_backend.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <climits>
#include <exception>
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/device/device_list.h"
#include "penstock/tensor/reason.h"
#include "penstock/transport/device_plugin.h"
#include "penstock/transport/plugin_library.h"

namespace penstock {
namespace {

// Returns why this process cannot use CUDA through libtorch, or "".
std::string why_no_cuda() {
  if (at::hasCUDA()) return "";
  void* const loaded = ::dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (loaded == nullptr) {
    return "libtorch has no CUDA: there is no libtorch_cuda.so in the directory of libtorch_cpu.so.\n"
           "  Hint: install the CUDA build of torch, and add its directory torch/lib to LD_LIBRARY_PATH.";
  }
  ::dlclose(loaded);
  if (!at::globalContext().hasCUDART()) {
    return "libtorch_cuda.so was loaded after the first use of libtorch, which does not use it.\n"
           "  Hint: call load_accelerator() before the first operator runs.";
  }
  return "CUDA finds no GPU.\n"
         "  Hint: `nvidia-smi` lists GPUs and tests the driver; CUDA_VISIBLE_DEVICES may hide them.";
}

DeviceBackends load_nccl(at::Device device) {
  load_accelerator();
  if (std::string reason = why_no_cuda(); !reason.empty()) return {.reason = std::move(reason)};
  internal::PluginLibrary plugin = internal::load_plugin({.name = "libpenstock_nccl.so",
                                                          .path_variable = "PENSTOCK_NCCL_PLUGIN",
                                                          .directories = internal::plugin_directories(),
                                                          .install_hint = "build Penstock with -DPENSTOCK_NCCL=ON"});
  if (plugin.handle == nullptr) return {.reason = std::move(plugin.reason)};
  return internal::device_backends_of(plugin.handle, device);
}

}  // namespace

DeviceBackends device_backends(at::Device device) {
  if (device.is_cpu()) {
    return {.reason = "the rank is on the CPU, whose tensors need no device backend.\n  Hint: name the rank's device."};
  }
  if (!device.is_cuda()) {
    return {.reason = internal::concat("there is no plugin for ", internal::device_type_name(device.type()),
                                       " devices.\n  Hint: stage tensors in CPU memory.")};
  }
  try {
    return load_nccl(device);
  } catch (const std::exception& error) {
    return {.reason = internal::reason_of(error)};
  }
}

void load_accelerator() {
  void* const cpu = ::dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (cpu == nullptr) return;
  std::array<char, PATH_MAX> directory{};
  const bool found = ::dlinfo(cpu, RTLD_DI_ORIGIN, directory.data()) == 0;
  ::dlclose(cpu);
  if (found) internal::load_accelerator_from(directory.data());
}

}  // namespace penstock
