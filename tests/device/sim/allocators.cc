#include "tests/device/sim/allocators.h"

#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <utility>

#include "tests/device/sim/kernels.h"
#include "tests/device/sim/simulation.h"

namespace penstock::sim {
namespace {

// The context of a DataPtr is its address, so that libtorch takes it for a simple one, which can be copied on write.
void release(void* pointer) {
  Simulation::get().release(pointer);
}

class SimDeviceAllocator final : public c10::DeviceAllocator {
 public:
  // Allocates on the current stream of the current device.
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device(kSim, current_device());
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    const c10::Stream stream = current_stream(device.index());
    Block* const block = Simulation::get().allocate(device.index(), stream.id(), bytes);
    return {block->base, block->base, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    copy_bytes({kSim, Simulation::get().device_of(to)}, "copy_data", to, from, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    for (int device = 0; device < Simulation::get().options().devices; ++device) {
      Simulation::get().empty_cache(static_cast<c10::DeviceIndex>(device));
    }
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Simulation::get().record_stream(pointer.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats result;
    Simulation::get().with_statistics(device, [&result](auto& statistics) { result = statistics; });
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Simulation::get().with_statistics(device, [](auto& statistics) {
      for (auto* stat : {&statistics.allocation, &statistics.active, &statistics.allocated_bytes,
                         &statistics.reserved_bytes, &statistics.active_bytes, &statistics.requested_bytes}) {
        (*stat)[0].reset_accumulated();
      }
    });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Simulation::get().with_statistics(device, [](auto& statistics) {
      for (auto* stat : {&statistics.allocation, &statistics.active, &statistics.allocated_bytes,
                         &statistics.reserved_bytes, &statistics.active_bytes, &statistics.requested_bytes}) {
        (*stat)[0].reset_peak();
      }
    });
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto statistics = getDeviceStats(device);
    const std::size_t total = Simulation::get().options().device_bytes;
    return {total - static_cast<std::size_t>(statistics.reserved_bytes[0].current), total};
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
    Block* const block = Simulation::get().allocate(kPinned, /*stream=*/0, bytes);
    return {block->base, block->base, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  // Every kernel that uses pinned memory is known, so there is nothing to record.
  bool record_event(void* /*pointer*/, void* /*context*/, c10::Stream /*stream*/) override { return true; }
  void empty_cache() override { Simulation::get().empty_cache(kPinned); }
  at::HostStats get_stats() override {
    at::HostStats result;
    Simulation::get().with_statistics(kPinned, [&result](auto& statistics) {
      result.active_requests = statistics.allocation[0];
      result.active_bytes = statistics.allocated_bytes[0];
      result.allocated_bytes = statistics.reserved_bytes[0];
    });
    return result;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* const allocator = new SimDeviceAllocator;
  return *allocator;
}

at::HostAllocator& pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

}  // namespace penstock::sim
