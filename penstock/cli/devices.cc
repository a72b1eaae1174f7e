#include "penstock/cli/devices.h"

#include <ATen/DeviceAccelerator.h>
#include <dlfcn.h>

#include <filesystem>
#include <optional>

#include "penstock/cli/program/local_ranks.h"
#include "penstock/transport/device_plugin.h"
#include "penstock/transport/plugin_library.h"
#include "penstock/transport/rendezvous.h"

namespace penstock::internal::cli {
namespace {

DeviceList default_devices() {
  // Ranks that this command has started itself take the devices of the process that started them.
  if (LocalRanks::is_rank() || !is_in_rank_environment()) return {};
  load_accelerator();
  const std::optional<at::DeviceType> type = at::accelerator::getAccelerator(/*checked=*/false);
  if (!type || at::accelerator::deviceCount() == 0) return {};
  return {*type, {}};
}

DeviceList devices_of(const std::string& text) {
  if (text.empty()) return default_devices();
  DeviceList devices = parse_devices(text);
  if (devices.type() == at::kPrivateUse1) {
    load_simulated_device();
  } else if (!devices.is_cpu()) {
    load_accelerator();
  }
  return devices;
}

void* load_simulated_library() {
  const std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe");
  const PluginLibrary library =
      load_plugin({.name = "libpenstock_sim.so",
                   .path_variable = "PENSTOCK_SIM_LIBRARY",
                   .directories = {(executable.parent_path() / ".." / "lib").lexically_normal()},
                   .install_hint = "build the target penstock_sim, which is a tool for tests"});
  if (library.handle == nullptr) throw DeviceError("the simulated device cannot be used: " + library.reason);
  return library.handle;
}

}  // namespace

void DeviceOption::add_to(CLI::App& command) {
  command
      .add_option("--device", text,
                  "Devices of the ranks, dealt to them in turn on each machine; sim is a simulated device for tests "
                  "(default: the CPU, or the accelerator in a rank of torchrun, srun or mpirun)")
      ->option_text("cpu|cuda|xpu|sim[:I,J…]");
}

DeviceList DeviceOption::load() const {
  const DeviceList devices = devices_of(text).complete();
  if (devices.is_cpu() || !is_in_rank_environment()) return devices;
  return {devices.type(), {devices.of(read_environment().local_rank)}};
}

void load_simulated_device() {
  void* const install = ::dlsym(load_simulated_library(), "penstock_device_install");
  if (install == nullptr) {
    throw DeviceError(std::string("the library of the simulated device has no penstock_device_install: ") +
                      ::dlerror() +
                      ".\n  Hint: set PENSTOCK_SIM_LIBRARY to the path of libpenstock_sim.so, or unset it.");
  }
  // The library has written the reason to standard error.
  if (reinterpret_cast<int (*)()>(install)() != 0) throw DeviceError("the simulated device could not be installed.");
}

DeviceBackends simulated_device_backends(at::Device device) {
  return device_backends_of(load_simulated_library(), device);
}

}  // namespace penstock::internal::cli
