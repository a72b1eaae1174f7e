#include "penstock/transport/block_pool.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace penstock::internal {
namespace {

// Eight sizes from one power of two to the next, so that a block is at most an eighth too large.
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
  auto block = std::make_shared<Block>(take(size_class(elements * c10::elementSize(dtype))));
  void* data = block->memory.get();
  return at::from_blob(
      data, sizes, strides, [pool = shared_from_this(), block](void*) { pool->give_back(std::move(*block)); },
      at::TensorOptions(dtype));
}

BlockPool::Block BlockPool::take(std::size_t size) {
  {
    const std::lock_guard lock(mutex_);
    std::vector<Block>& blocks = free_[size];
    if (!blocks.empty()) {
      Block block = std::move(blocks.back());
      blocks.pop_back();
      bytes_free_ -= size;
      return block;
    }
  }
  Block block{.memory = c10::GetCPUAllocator()->allocate(size), .size = size};
  const std::lock_guard lock(mutex_);
  bytes_ += size;
  return block;
}

void BlockPool::give_back(Block block) {
  const std::lock_guard lock(mutex_);
  block.used_in = turn_;
  bytes_free_ += block.size;
  std::vector<Block>& blocks = free_[block.size];
  blocks.push_back(std::move(block));
}

void BlockPool::turn() {
  const std::lock_guard lock(mutex_);
  drop_before(turn_);
  ++turn_;
}

void BlockPool::trim() {
  const std::lock_guard lock(mutex_);
  drop_before(turn_ + 1);
}

void BlockPool::drop_before(std::uint64_t turn) {
  for (auto& [size, blocks] : free_) {
    const std::size_t dropped = std::erase_if(blocks, [turn](const Block& block) { return block.used_in < turn; });
    bytes_ -= dropped * size;
    bytes_free_ -= dropped * size;
  }
  std::erase_if(free_, [](const auto& entry) { return entry.second.empty(); });
}

std::size_t BlockPool::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::size_t BlockPool::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return bytes_ - bytes_free_;
}

}  // namespace penstock::internal
