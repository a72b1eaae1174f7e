#include "tests/device/cuda_standin/memory.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>

#include "tests/device/cuda_standin/runtime.h"
#include "tests/device/cuda_standin/streams.h"

namespace cuda_standin {

Arena::Arena(const char* name, int protection) {
  const int file = ::memfd_create(name, MFD_CLOEXEC);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(kMemoryBytes)) != 0) fail("memory cannot be reserved");
  constexpr int kFlags = MAP_SHARED | MAP_NORESERVE;
  void* const addresses = ::mmap(nullptr, kMemoryBytes, protection, kFlags, file, 0);
  void* const accessible = ::mmap(nullptr, kMemoryBytes, PROT_READ | PROT_WRITE, kFlags, file, 0);
  if (addresses == MAP_FAILED || accessible == MAP_FAILED) fail("memory cannot be mapped");
  ::close(file);
  addresses_ = static_cast<char*>(addresses);
  accessible_ = static_cast<char*>(accessible);
}

void* Arena::allocate(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  if (bytes > kMemoryBytes) return nullptr;
  const std::size_t size = (bytes + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(mutex_);
  char* block = nullptr;
  if (const auto found = released_.find(size); found != released_.end()) {
    block = found->second;
    released_.erase(found);
  } else {
    if (size > kMemoryBytes - end_) return nullptr;
    block = addresses_ + end_;
    end_ += size;
  }
  blocks_[block] = size;
  return block;
}

void Arena::release(void* block) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(static_cast<char*>(block));
  if (found == blocks_.end()) return;
  released_.emplace(found->second, found->first);
  blocks_.erase(found);
}

bool Arena::contains(const void* address) const {
  const char* const byte = static_cast<const char*>(address);
  return byte >= addresses_ && byte < addresses_ + kMemoryBytes;
}

void* Arena::accessible(const void* address) const {
  return accessible_ + (static_cast<const char*>(address) - addresses_);
}

std::size_t Arena::unused_bytes() {
  const std::lock_guard lock(mutex_);
  return kMemoryBytes - end_;
}

Arena& device_memory(int device) {
  static const auto kArenas = [] {
    std::array<Arena*, kDevices> arenas{};
    for (Arena*& arena : arenas) arena = new Arena("cuda_standin_device", PROT_NONE);
    return arenas;
  }();
  return *kArenas[static_cast<std::size_t>(device)];
}

Arena& pinned_memory() {
  static auto* const kArena = new Arena("cuda_standin_pinned", PROT_READ | PROT_WRITE);
  return *kArena;
}

int device_of(const void* address) {
  for (int device = 0; device < kDevices; ++device) {
    if (device_memory(device).contains(address)) return device;
  }
  return -1;
}

bool is_allocated_by_cuda(const void* address) {
  return device_of(address) >= 0 || pinned_memory().contains(address);
}

void* accessible(const void* address) {
  const int device = device_of(address);
  return device >= 0 ? device_memory(device).accessible(address) : const_cast<void*>(address);
}

}  // namespace cuda_standin

using cuda_standin::current_device;
using cuda_standin::device_memory;
using cuda_standin::device_of;
using cuda_standin::pinned_memory;
using cuda_standin::remember;

CUDA_STANDIN_EXPORT cudaError_t cudaMalloc(void** block, std::size_t bytes) {
  *block = device_memory(current_device()).allocate(bytes);
  return remember(*block == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

CUDA_STANDIN_EXPORT cudaError_t cudaFree(void* block) {
  const int device = device_of(block);
  if (device < 0) return cudaSuccess;
  cuda_standin::synchronize_device(device);
  device_memory(device).release(block);
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaHostAlloc(void** block, std::size_t bytes, unsigned /*flags*/) {
  *block = pinned_memory().allocate(bytes);
  return remember(*block == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}

CUDA_STANDIN_EXPORT cudaError_t cudaFreeHost(void* block) {
  pinned_memory().release(block);
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaMemGetInfo(std::size_t* available, std::size_t* total) {
  *total = cuda_standin::kMemoryBytes;
  *available = device_memory(current_device()).unused_bytes();
  return cudaSuccess;
}

CUDA_STANDIN_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  void* const pointer = const_cast<void*>(address);
  const int device = device_of(address);
  if (device >= 0) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = device;
    attributes->devicePointer = pointer;
  } else if (pinned_memory().contains(address)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = pointer;
    attributes->hostPointer = pointer;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
  }
  return cudaSuccess;
}
