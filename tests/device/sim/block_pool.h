// Blocks of device memory and of pinned memory, with the rules of CUDA's caching allocators. All functions are called
// with the lock of the simulation held.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "tests/device/sim/dual_mapping.h"
#include "tests/device/sim/stream_queue.h"

namespace penstock::sim {

// Index of pinned memory where devices are counted.
inline constexpr c10::DeviceIndex kPinned = -1;

// One access of a kernel to a block.
struct Access {
  std::uintptr_t low = 0;
  std::uintptr_t high = 0;  // exclusive
  int stream = 0;           // index of the StreamQueue
  std::uint64_t time = 0;   // of that stream's clock
  bool writes = false;
  const char* operation = nullptr;
  c10::SmallVector<std::int64_t, 4> sizes;
  std::uint64_t generation = 0;  // of the block
};

struct Block {
  char* base = nullptr;
  std::size_t bytes = 0;
  c10::DeviceIndex device = kPinned;
  c10::StreamId stream = 0;  // on which it was allocated
  // Number of times that it was allocated.
  std::uint64_t generation = 0;
  // Indices of the streams that record_stream named.
  std::set<int> recorded_streams;
  // Points that have to be passed before it is reused.
  std::vector<std::shared_ptr<EventPoint>> pending;
  std::vector<Access> accesses;
};

class BlockPool {
 public:
  // Both mappings have to outlive the pool.
  BlockPool(const DualMapping& device_memory, const DualMapping& pinned_memory, int devices, std::size_t device_bytes);

  // Returns a block of at least this size, or null if the memory of the device is exhausted by blocks that are in use,
  // cached or pending.
  Block* allocate(c10::DeviceIndex device, c10::StreamId stream, std::size_t bytes);
  // Caches the block. It can be allocated again on its stream once its `pending` points are passed.
  void release(Block* block);
  // Returns the block that contains the address, or null.
  Block* find(const void* pointer) const;
  // Returns the memory of all blocks of the device that are cached. Nothing may be in flight on the device.
  void return_cached_memory(c10::DeviceIndex device);

  c10::CachingDeviceAllocator::DeviceStats& statistics(c10::DeviceIndex device);
  std::size_t device_bytes() const { return device_bytes_; }

 private:
  // Address ranges that no block has, by offset in the mapping.
  using Ranges = std::map<std::size_t, std::size_t>;
  using Key = std::tuple<c10::DeviceIndex, c10::StreamId, std::size_t>;

  void collect_pending();
  std::optional<std::size_t> take_range(c10::DeviceIndex device, std::size_t bytes);
  void return_range(c10::DeviceIndex device, std::size_t offset, std::size_t bytes);
  const DualMapping& mapping(c10::DeviceIndex device) const { return device == kPinned ? pinned_ : device_; }
  void count(const Block& block, bool allocated);

  const DualMapping& device_;
  const DualMapping& pinned_;
  const std::size_t device_bytes_;
  std::map<std::uintptr_t, std::unique_ptr<Block>> blocks_;
  std::map<Key, std::vector<Block*>> cached_;
  std::vector<Block*> pending_;
  std::vector<Ranges> free_ranges_;  // by device, then of pinned memory
  std::vector<c10::CachingDeviceAllocator::DeviceStats> statistics_;
};

}  // namespace penstock::sim
