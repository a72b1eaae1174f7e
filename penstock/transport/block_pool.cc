#include "penstock/transport/block_pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace penstock::internal {
namespace {

// Rounds a size up to one of eight sizes between two powers of two, so that a block is at most an eighth too large.
std::size_t size_class(std::size_t size) {
  const std::size_t step = std::max<std::size_t>(64, std::bit_floor(std::max<std::size_t>(size, 1)) / 8);
  return (std::max<std::size_t>(size, 1) + step - 1) / step * step;
}

}  // namespace

at::Tensor BlockPool::empty_bytes(std::size_t count) {
  return empty({static_cast<std::int64_t>(count)}, {1}, at::kByte);
}

at::Tensor BlockPool::empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const auto elements = static_cast<std::size_t>(c10::multiply_integers(sizes));
  auto block = std::make_shared<Block>(allocate(size_class(elements * c10::elementSize(dtype))));
  void* data = block->memory.get();
  return at::from_blob(
      data, sizes, strides, [pool = shared_from_this(), block](void*) { pool->release(std::move(*block)); },
      at::TensorOptions(dtype));
}

BlockPool::Block BlockPool::allocate(std::size_t size) {
  {
    const MutexLock lock(mutex_);
    std::vector<Block>& blocks = free_[size];
    if (!blocks.empty()) {
      Block block = std::move(blocks.back());
      blocks.pop_back();
      bytes_free_ -= size;
      return block;
    }
  }
  Block block{.memory = c10::GetCPUAllocator()->allocate(size), .size = size};
  const MutexLock lock(mutex_);
  bytes_ += size;
  return block;
}

void BlockPool::release(Block block) {
  const MutexLock lock(mutex_);
  block.last_step = step_;
  bytes_free_ += block.size;
  std::vector<Block>& blocks = free_[block.size];
  blocks.push_back(std::move(block));
}

void BlockPool::begin_step() {
  const MutexLock lock(mutex_);
  free_unused_since(step_);
  ++step_;
}

void BlockPool::trim() {
  const MutexLock lock(mutex_);
  free_unused_since(step_ + 1);
}

void BlockPool::free_unused_since(std::uint64_t step) {
  for (auto& [size, blocks] : free_) {
    const std::size_t freed = std::erase_if(blocks, [step](const Block& block) { return block.last_step < step; });
    bytes_ -= freed * size;
    bytes_free_ -= freed * size;
  }
  std::erase_if(free_, [](const auto& entry) { return entry.second.empty(); });
}

std::size_t BlockPool::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

std::size_t BlockPool::bytes_in_use() const {
  const MutexLock lock(mutex_);
  return bytes_ - bytes_free_;
}

}  // namespace penstock::internal
