// A caching allocator for received tensors. A block returns to the pool when the last tensor that uses it is destroyed,
// and is reused for the next tensor of about its size. The pool's size is bounded by what is in use at once, not by the
// number of messages.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "penstock/base/mutex.h"

namespace penstock::internal {

// Thread-safe. Each tensor shares ownership of the pool, so that the pool outlives its tensors.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  static std::shared_ptr<BlockPool> make() { return std::shared_ptr<BlockPool>(new BlockPool); }

  // Returns an uninitialised CPU tensor. The strides must leave no gaps.
  at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  at::Tensor empty_bytes(std::size_t count);

  // Begins a step: frees the blocks that were not used in the previous step.
  void begin_step() PENSTOCK_EXCLUDES(mutex_);
  // Frees all blocks that are not in use.
  void trim() PENSTOCK_EXCLUDES(mutex_);

  // Returns the size of all blocks, in use or not.
  std::size_t bytes() const PENSTOCK_EXCLUDES(mutex_);
  std::size_t bytes_in_use() const PENSTOCK_EXCLUDES(mutex_);

 private:
  struct Block {
    at::DataPtr memory;
    std::size_t size = 0;
    // The last step in which a tensor used the block.
    std::uint64_t last_step = 0;
  };

  BlockPool() = default;
  Block allocate(std::size_t size) PENSTOCK_EXCLUDES(mutex_);
  void release(Block block) PENSTOCK_EXCLUDES(mutex_);
  void free_unused_since(std::uint64_t step) PENSTOCK_REQUIRES(mutex_);

  // A leaf lock: no other is acquired while it is held. Blocks are freed with it held.
  mutable Mutex mutex_;
  std::uint64_t step_ PENSTOCK_GUARDED_BY(mutex_) = 1;
  std::size_t bytes_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  std::size_t bytes_free_ PENSTOCK_GUARDED_BY(mutex_) = 0;
  // Unused blocks by size. The most recently used block is the last, and is reused first.
  std::map<std::size_t, std::vector<Block>> free_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::internal
