#include "tests/device/sim/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace penstock::sim {
namespace {

// Blocks of device memory have sizes that are multiples of this; larger ones of 2 MiB, so that similar sizes share them.
constexpr std::size_t kSmallUnit = 512;
constexpr std::size_t kLargeBlock = std::size_t{1} << 20U;
constexpr std::size_t kLargeUnit = std::size_t{2} << 20U;

std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t block_bytes(c10::DeviceIndex device, std::size_t bytes) {
  if (bytes > kLargeBlock) return round_up(bytes, kLargeUnit);
  // The host's access to pinned memory is restricted by page.
  return round_up(bytes, device == kPinned ? kPageBytes : kSmallUnit);
}

}  // namespace

BlockPool::BlockPool(const DualMapping& device_memory, const DualMapping& pinned_memory, int devices,
                     std::size_t device_bytes)
    : device_(device_memory), pinned_(pinned_memory), device_bytes_(device_bytes) {
  for (int device = 0; device < devices; ++device) {
    free_ranges_.push_back({{static_cast<std::size_t>(device) * device_bytes, device_bytes}});
  }
  free_ranges_.push_back({{0, device_bytes}});
  statistics_.resize(static_cast<std::size_t>(devices) + 1);
}

c10::CachingDeviceAllocator::DeviceStats& BlockPool::statistics(c10::DeviceIndex device) {
  return device == kPinned ? statistics_.back() : statistics_.at(static_cast<std::size_t>(device));
}

Block* BlockPool::find(const void* pointer) const {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  const auto& [base, block] = *std::prev(next);
  return address < base + block->bytes ? block.get() : nullptr;
}

void BlockPool::count(const Block& block, bool allocated) {
  auto& statistics = this->statistics(block.device);
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto change = [allocated](c10::CachingAllocator::Stat& stat, std::size_t amount) {
    if (allocated) {
      stat.increase(amount);
    } else {
      stat.decrease(amount);
    }
  };
  change(statistics.allocation[kAll], 1);
  change(statistics.active[kAll], 1);
  change(statistics.allocated_bytes[kAll], block.bytes);
  change(statistics.active_bytes[kAll], block.bytes);
  change(statistics.requested_bytes[kAll], block.bytes);
}

Block* BlockPool::allocate(c10::DeviceIndex device, c10::StreamId stream, std::size_t bytes) {
  collect_pending();
  const std::size_t size = block_bytes(device, bytes);
  Block* block = nullptr;
  if (auto& cached = cached_[{device, stream, size}]; !cached.empty()) {
    block = cached.back();
    cached.pop_back();
  } else {
    const std::optional<std::size_t> offset = take_range(device, size);
    if (!offset) return nullptr;
    auto created = std::make_unique<Block>();
    created->base = mapping(device).host_address(*offset);
    created->bytes = size;
    created->device = device;
    created->stream = stream;
    block = created.get();
    blocks_[reinterpret_cast<std::uintptr_t>(block->base)] = std::move(created);
    statistics(device).reserved_bytes[0].increase(size);
  }
  ++block->generation;
  count(*block, /*allocated=*/true);
  return block;
}

void BlockPool::release(Block* block) {
  count(*block, /*allocated=*/false);
  block->recorded_streams.clear();
  if (block->pending.empty()) {
    cached_[{block->device, block->stream, block->bytes}].push_back(block);
  } else {
    pending_.push_back(block);
  }
}

void BlockPool::collect_pending() {
  std::erase_if(pending_, [this](Block* block) {
    const bool passed =
        std::all_of(block->pending.begin(), block->pending.end(), [](const auto& point) { return point->is_passed(); });
    if (!passed) return false;
    // The allocator has seen that these accesses are complete.
    VectorClock complete;
    for (const auto& point : block->pending) complete.merge(point->clock());
    std::erase_if(block->accesses,
                  [&complete](const Access& access) { return complete.covers(access.stream, access.time); });
    block->pending.clear();
    if (block->device == kPinned) DualMapping::protect(block->base, block->bytes, PROT_READ | PROT_WRITE);
    cached_[{block->device, block->stream, block->bytes}].push_back(block);
    return true;
  });
}

void BlockPool::return_cached_memory(c10::DeviceIndex device) {
  collect_pending();
  for (auto& [key, blocks] : cached_) {
    if (std::get<0>(key) != device) continue;
    for (const Block* block : blocks) {
      mapping(device).discard(block->base, block->bytes);
      statistics(device).reserved_bytes[0].decrease(block->bytes);
      return_range(device, mapping(device).offset_of(block->base), block->bytes);
      blocks_.erase(reinterpret_cast<std::uintptr_t>(block->base));
    }
    blocks.clear();
  }
}

std::optional<std::size_t> BlockPool::take_range(c10::DeviceIndex device, std::size_t bytes) {
  Ranges& ranges = device == kPinned ? free_ranges_.back() : free_ranges_.at(static_cast<std::size_t>(device));
  const auto found =
      std::find_if(ranges.begin(), ranges.end(), [bytes](const auto& range) { return range.second >= bytes; });
  if (found == ranges.end()) return std::nullopt;
  const auto [offset, size] = *found;
  ranges.erase(found);
  if (size > bytes) ranges.emplace(offset + bytes, size - bytes);
  return offset;
}

void BlockPool::return_range(c10::DeviceIndex device, std::size_t offset, std::size_t bytes) {
  Ranges& ranges = device == kPinned ? free_ranges_.back() : free_ranges_.at(static_cast<std::size_t>(device));
  auto next = ranges.lower_bound(offset);
  if (next != ranges.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = ranges.erase(next);
  }
  if (next != ranges.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  ranges.emplace(offset, bytes);
}

}  // namespace penstock::sim
