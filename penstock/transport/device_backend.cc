#include "penstock/transport/device_backend.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <link.h>

#include <array>
#include <climits>
#include <stdexcept>
#include <system_error>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "penstock/transport/nccl_plugin.h"
#include "penstock/transport/plugin_library.h"

namespace penstock::internal {
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

}  // namespace

void load_accelerator_from(const std::filesystem::path& directory) {
  for (const char* const name : {"libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so"}) {
    std::error_code error;
    if (!std::filesystem::exists(directory / name, error)) continue;
    // Its symbols are global, since plugins are not linked with it.
    load_library(directory / name, RTLD_GLOBAL,
                 "install the packages that this build of torch needs (`pip check` names them), or the CPU build.");
  }
}

void load_accelerator() {
  void* const cpu = ::dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
  if (cpu == nullptr) return;
  std::array<char, PATH_MAX> directory{};
  const bool found = ::dlinfo(cpu, RTLD_DI_ORIGIN, directory.data()) == 0;
  ::dlclose(cpu);
  if (found) load_accelerator_from(directory.data());
}

DeviceBackendFactory device_backends_of(void* plugin) {
  void* const symbol = ::dlsym(plugin, kCreateDeviceBackend);
  if (symbol == nullptr) {
    throw std::runtime_error(std::string("the library is not a plugin of Penstock: ") + ::dlerror() +
                             ".\n  Hint: build libpenstock_nccl.so with -DPENSTOCK_NCCL=ON.");
  }
  const auto create = reinterpret_cast<CreateDeviceBackend*>(symbol);
  return [create](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, at::Device device) {
    return c10::intrusive_ptr<c10d::Backend>::reclaim(create(store.get(), rank, size, device.index()));
  };
}

DeviceBackends load_device_backends(at::DeviceType type) {
  if (type != at::kCUDA) {
    return {.reason = "there is no plugin for " + c10::DeviceTypeName(type, /*lower_case=*/true) +
                      " devices.\n  Hint: send their tensors through CPU memory."};
  }
  load_accelerator();
  if (std::string reason = why_no_cuda(); !reason.empty()) return {.reason = std::move(reason)};
  PluginLibrary plugin = load_plugin({.name = "libpenstock_nccl.so",
                                      .path_variable = "PENSTOCK_NCCL_PLUGIN",
                                      .directories = plugin_directories(),
                                      .install_hint = "build Penstock with -DPENSTOCK_NCCL=ON"});
  if (plugin.handle == nullptr) return {.reason = std::move(plugin.reason)};
  return {.create = device_backends_of(plugin.handle)};
}

}  // namespace penstock::internal
