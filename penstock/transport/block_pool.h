// Memory for what is received. A tensor's block goes back when the last tensor that uses it is gone, and serves the next
// one of about that size: there is as much of it as was ever in use at once, however many messages come.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace penstock::internal {

// May be used by several threads. It lives on while a tensor uses a block.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  static std::shared_ptr<BlockPool> make() { return std::shared_ptr<BlockPool>(new BlockPool); }

  // A tensor on the CPU with whatever is in its memory. The strides leave no gaps.
  at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  at::Tensor empty_bytes(std::size_t count);

  // Says that a step ends: what was not used since the step before is given back to the system.
  void turn();
  // Gives back all that is not in use.
  void trim();

  // All memory that the pool has, in use or not.
  std::size_t bytes() const;
  std::size_t bytes_in_use() const;

 private:
  struct Block {
    at::DataPtr memory;
    std::size_t size = 0;
    std::uint64_t used_in = 0;
  };

  BlockPool() = default;
  Block take(std::size_t size);
  void give_back(Block block);
  void drop_before(std::uint64_t turn);

  mutable std::mutex mutex_;
  std::uint64_t turn_ = 1;
  std::size_t bytes_ = 0;
  std::size_t bytes_free_ = 0;
  // By size; the last one was used last.
  std::map<std::size_t, std::vector<Block>> free_;
};

}  // namespace penstock::internal
