// The library libpenstock_nccl.so. This is the only source that includes ProcessGroupNCCL and NVIDIA's headers.
#include "penstock/transport/nccl_plugin.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <c10/util/env.h>
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>
#include <vector>

namespace penstock::internal {
namespace {

// Sets a variable unless one of its names is set.
void set_default(const std::vector<const char*>& names, const char* value) {
  for (const char* const name : names) {
    if (c10::utils::has_env(name)) return;
  }
  c10::utils::set_env(names.front(), value);
}

// Leaves errors and timeouts to Penstock, which reports them with rank, stage and action. ProcessGroupNCCL reads these
// variables when it is constructed.
void set_defaults() {
  // By default, an error ends the process from PyTorch's watchdog thread.
  set_default({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, "0");
  // By default, the process is aborted if the watchdog thread makes no progress.
  set_default({"TORCH_NCCL_ENABLE_MONITORING"}, "0");
  // By default, ranks of a group connect at their first collective, and block their hosts meanwhile.
  set_default({"NCCL_RUNTIME_CONNECT"}, "0");
  // Each direction between two ranks has a group of its own, so there is nothing to warn of.
  set_default({"TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"}, "0");
}

using Version = std::array<std::uint64_t, 3>;
constexpr Version kHeaders{NCCL_MAJOR, NCCL_MINOR, NCCL_PATCH};

std::string text_of(const Version& version) {
  return std::to_string(version[0]) + "." + std::to_string(version[1]) + "." + std::to_string(version[2]);
}

// Throws if libtorch was compiled with other headers of NCCL: the size of ProcessGroupNCCL's options depends on them.
void check_headers() {
  const std::uint64_t number = torch::cuda::nccl::version();
  const Version torch{number >> 32U, (number >> 16U) & 0xffffU, number & 0xffffU};
  if (torch == kHeaders) return;
  throw std::runtime_error("libpenstock_nccl.so was compiled with the headers of NCCL " + text_of(kHeaders) +
                           ", and libtorch_cuda.so with those of NCCL " + text_of(torch) +
                           ".\n  Hint: build the plugin with the headers of NCCL " + text_of(torch) +
                           ": the package nvidia-nccl-cu13 of this version has them.");
}

// Throws if libnccl lacks what libtorch was compiled for.
void check_library() {
  int number = 0;
  if (ncclGetVersion(&number) != ncclSuccess) throw std::runtime_error("libnccl.so does not tell its version.");
  if (number >= NCCL_VERSION_CODE) return;
  const auto code = static_cast<std::uint64_t>(number);
  throw std::runtime_error("libnccl.so is NCCL " + text_of({code / 10000, code / 100 % 100, code % 100}) +
                           ", and libtorch_cuda.so needs NCCL " + text_of(kHeaders) +
                           " or later.\n  Hint: remove the older libnccl.so from LD_LIBRARY_PATH and LD_PRELOAD.");
}

void check_versions() {
  check_headers();
  check_library();
}

void check_device(int index) {
  const int count = c10::cuda::device_count();
  if (index < 0 || index >= count) {
    throw std::runtime_error("there is no device cuda:" + std::to_string(index) + ": CUDA finds " +
                             std::to_string(count) + (count == 1 ? " device" : " devices") +
                             ", numbered from 0.\n  Hint: CUDA_VISIBLE_DEVICES may hide devices.");
  }
}

// Blocks until all ranks have called it, for the timeout of the store. NCCL itself waits for a missing rank forever.
void wait_for_ranks(c10d::Store& store, int size) {
  if (store.add("ready", 1) == size) store.set("all_ready", std::vector<std::uint8_t>{1});
  store.wait({"all_ready"});
}

c10::intrusive_ptr<c10d::ProcessGroupNCCL> connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                   at::Device device) {
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  // Deadlines are Penstock's. PyTorch's watchdog must not end an operation before.
  options->timeout = std::chrono::hours(24 * 30);
  options->group_name = "penstock";
  // A non-blocking communicator would connect in the background, with PyTorch's timeout.
  options->config.blocking = 1;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
  try {
    wait_for_ranks(*store, size);
    // Connects now, instead of with the first operation, which would block until the other rank has one too.
    group->setBoundDeviceId(device);
    group->eagerConnectSingleDevice(device);
  } catch (...) {
    group->abort();
    throw;
  }
  return group;
}

c10d::Backend* create(c10d::Store* store, int rank, int size, int device_index) {
  check_versions();
  check_device(device_index);
  [[maybe_unused]] static const bool kHasDefaults = [] {
    set_defaults();
    return true;
  }();
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(device_index));
  try {
    return connect(c10::intrusive_ptr<c10d::Store>::reclaim_copy(store), rank, size, device).release();
  } catch (const c10::Error& error) {
    throw std::runtime_error(
        "NCCL cannot connect rank " + std::to_string(rank) + " of " + std::to_string(size) + " on " + device.str() +
        ": " + error.what_without_backtrace() +
        "\n  Hint: NCCL_DEBUG=INFO prints what NCCL does. Each rank of a group needs a GPU of its own.");
  }
}

// NCCL refuses two ranks whose GPUs have the same address on one machine.
std::string pci_address_of(int index) {
  check_versions();
  check_device(index);
  std::array<char, 32> text{};
  const cudaError_t error = cudaDeviceGetPCIBusId(text.data(), static_cast<int>(text.size()), index);
  if (error == cudaSuccess) return text.data();
  throw std::runtime_error("CUDA does not tell the PCI address of cuda:" + std::to_string(index) + ": " +
                           cudaGetErrorString(error) + ".\n  Hint: `nvidia-smi` tests the driver.");
}

}  // namespace
}  // namespace penstock::internal

extern "C" __attribute__((visibility("default"))) c10d::Backend* penstock_device_backend(c10d::Store* store, int rank,
                                                                                         int size, int device_index) {
  return penstock::internal::create(store, rank, size, device_index);
}

extern "C" __attribute__((visibility("default"))) void penstock_device_id(int device_index, std::string& id) {
  id = penstock::internal::pci_address_of(device_index);
}
