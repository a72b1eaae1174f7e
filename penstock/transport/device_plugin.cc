#include "penstock/transport/device_plugin.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "penstock/base/text.h"
#include "penstock/device/device_list.h"
#include "penstock/transport/nccl_plugin.h"
#include "penstock/transport/plugin_library.h"

namespace penstock::internal {
namespace {

template <class Function>
Function* exported_function(void* plugin, const char* name) {
  void* const symbol = ::dlsym(plugin, name);
  if (symbol != nullptr) return reinterpret_cast<Function*>(symbol);
  throw std::runtime_error(concat("the library is not a plugin of Penstock: ", ::dlerror(),
                                  ".\n  Hint: build libpenstock_nccl.so with -DPENSTOCK_NCCL=ON."));
}

// Returns a text that differs between machines, and that all containers of a machine share.
std::string machine_id() {
  std::string id;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  if (std::getline(file, id) && !id.empty()) return id;
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

DeviceBackends device_backends_of(void* plugin, at::Device device) {
  auto* const create = exported_function<CreateDeviceBackend>(plugin, kCreateDeviceBackend);
  auto* const identify = exported_function<IdentifyDevice>(plugin, kIdentifyDevice);
  DeviceBackends backends;
  if (device.has_index()) {
    std::string id;
    identify(device.index(), id);
    backends.device_id = concat(machine_id(), "/", device_type_name(device.type()), "/", id);
  }
  backends.create = [create](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, at::Device of_group) {
    return c10::intrusive_ptr<c10d::Backend>::reclaim(create(store.get(), rank, size, of_group.index()));
  };
  return backends;
}

void load_accelerator_from(const std::filesystem::path& directory) {
  for (const char* const name : {"libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so"}) {
    std::error_code error;
    if (!std::filesystem::exists(directory / name, error)) continue;
    // Its symbols are global, since plugins are not linked with it.
    load_library(directory / name, RTLD_GLOBAL,
                 "install the packages that this build of torch needs (`pip check` names them), or the CPU build.");
  }
}

}  // namespace penstock::internal
