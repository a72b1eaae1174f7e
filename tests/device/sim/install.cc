// Registration of the device with c10 and ATen, and its end at the process's exit.
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>

#include "tests/device/sim/allocators.h"
#include "tests/device/sim/device_guard.h"
#include "tests/device/sim/generator.h"
#include "tests/device/sim/kernels.h"
#include "tests/device/sim/sim_device.h"
#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return SimDeviceGuard().deviceCount(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { SimDeviceGuard().setDevice({kSim, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return SimDeviceGuard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return Simulation::get().is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* pointer) const override { return {kSim, Simulation::get().device_of(pointer)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

// Libraries unregister their kernels when they are destroyed, so they never are.
torch::Library& new_library(const char* space, c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, space, key, __FILE__, __LINE__);
}

void register_kernels() {
  torch::Library& kernels = new_library("aten", c10::DispatchKey::PrivateUse1);
  register_memory_kernels(kernels);
  register_layer_kernels(kernels);
  register_attention(kernels);
  register_cpu_kernels(kernels);
  // Copies conjugate and negate themselves: PyTorch's fallback would clone the source, which is another copy.
  for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    new_library("aten", key).impl("_copy_from", torch::CppFunction::makeFallthrough());
  }
  new_library("_", c10::DispatchKey::PrivateUse1).fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_stream>());
  register_autocast(new_library("aten", c10::DispatchKey::AutocastPrivateUse1));
  new_library("_", c10::DispatchKey::AutocastPrivateUse1).fallback(torch::CppFunction::makeFallthrough());
}

// Called at exit with the process's exit code.
void end(int code, void* /*unused*/) {
  Simulation& simulation = Simulation::get();
  const bool stopped = simulation.stop();
  if (!stopped) std::fprintf(stderr, "sim: a stream is still busy at exit\n");
  const std::vector<std::string> races =
      simulation.options().report_at_exit ? simulation.take_races() : std::vector<std::string>();
  for (const std::string& race : races) std::fprintf(stderr, "sim: %s\n", race.c_str());
  if (!races.empty()) std::fprintf(stderr, "sim: %zu races\n", races.size());
  if (stopped && (races.empty() || code != 0)) return;
  // A busy thread would use libtorch while its static objects are destroyed.
  std::fflush(nullptr);
  ::_exit(code == 0 && !races.empty() ? kExitRaces : code);
}

long long number_of(const char* variable, long long fallback) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? fallback : std::stoll(text);
}

Options options_of_environment() {
  Options options;
  options.devices = static_cast<int>(number_of("PENSTOCK_SIM_DEVICES", options.devices));
  options.seed = static_cast<std::uint64_t>(number_of("PENSTOCK_SIM_SEED", static_cast<long long>(options.seed)));
  options.max_delay_us = static_cast<int>(number_of("PENSTOCK_SIM_DELAY_US", options.max_delay_us));
  options.device_bytes =
      static_cast<std::size_t>(number_of("PENSTOCK_SIM_DEVICE_MB", static_cast<long long>(options.device_bytes >> 20U)))
      << 20U;
  options.print_host_waits = number_of("PENSTOCK_SIM_PRINT_HOST_WAITS", 0) != 0;
  options.report_at_exit = true;
  return options;
}

}  // namespace

void install(const Options& options) {
  TORCH_CHECK(options.devices > 0 && options.devices < 128, "sim: ", options.devices, " devices; expected 1 to 127");
  create_simulation(options);
  const Simulation& simulation = Simulation::get();
  install_fault_handler(simulation.device_memory(), options.device_bytes, simulation.pinned_memory());
  c10::register_privateuse1_backend("sim");
  c10::SetAllocator(kSim, &device_allocator());
  at::setHostAllocator(kSim, &pinned_allocator());
  c10::impl::registerDeviceGuard(kSim, new SimDeviceGuard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::globalContext().lazyInitDevice(kSim);
  register_kernels();
  ::on_exit(end, nullptr);
}

void set_max_delay_us(int microseconds) {
  max_delay_us = microseconds;
}
void set_throw_races(bool enabled) {
  Simulation::get().set_throw_races(enabled);
}
Counters counters() {
  return Simulation::get().counters();
}
std::vector<std::string> take_races() {
  return Simulation::get().take_races();
}
std::vector<std::string> simulation_waits() {
  return Simulation::get().simulation_waits();
}
std::vector<std::string> operators_without_meta() {
  return Simulation::get().operators_without_meta();
}
void trace_host_waits(bool enabled) {
  Simulation::get().trace_host_waits(enabled);
}
std::vector<std::string> take_host_wait_traces() {
  return Simulation::get().take_host_wait_traces();
}

void launch(c10::Stream stream, const char* name, const std::vector<Use>& uses, std::function<void()> kernel) {
  Simulation::get().launch(stream, name, uses, std::move(kernel));
}

}  // namespace penstock::sim

int penstock_device_install() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (penstock::sim::is_installed()) return 0;
  try {
    penstock::sim::install(penstock::sim::options_of_environment());
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sim: %s\n", error.what());
    return 1;
  }
}
