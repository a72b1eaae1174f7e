// Block-sparse attention masks. Blocks without an allowed pair of query and key are absent, in a full block every pair
// is allowed, and in a partial block the mask function decides. Attention visits only the blocks that are present.
//
//   BlockMask mask = create_block_mask(causal, /*batch=*/std::nullopt, /*heads=*/std::nullopt, 2048, 2048);
//   at::Tensor out = flex_attention(query, key, value, {}, mask);
//   c10::IValue value = mask.to_ivalue();               // a leaf of a nested value, like a tensor
//   std::vector<BlockMask> chunks = mask.split(4);      // for microbatches; BlockMask::merge reverses it
//
// A mask with batch 1 or with one head applies to every row of a batch or to every head; its function is then called
// with index 0. Tensors that the function captures must not change while the mask exists, as attention caches its
// evaluation of them with the mask. Any number of threads may use a mask. Copies share tensors, the function and the
// cache.
#pragma once

#include <ATen/TensorIndexing.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/tensor/mask_mod.h"
#include "penstock/tensor/nested.h"

namespace penstock {

// Number of queries and keys in a block.
struct BlockSize {
  BlockSize(std::int64_t both) : q(both), kv(both) {}  // NOLINT(google-explicit-constructor): a number is a square
  BlockSize(std::int64_t q_size, std::int64_t kv_size) : q(q_size), kv(kv_size) {}
  friend bool operator==(const BlockSize&, const BlockSize&) = default;

  std::int64_t q;
  std::int64_t kv;
};

// Numbers of queries and keys.
struct SeqLengths {
  std::int64_t q = 0;
  std::int64_t kv = 0;
  friend bool operator==(const SeqLengths&, const SeqLengths&) = default;
};

// The blocks that are present in each row of blocks: their number, int32 [batch, heads, rows], and their column
// indices, int32 [batch, heads, rows, columns], of which the first `num_blocks` count and the rest are ignored.
struct BlockList {
  at::Tensor num_blocks;
  at::Tensor indices;
};

class BlockMask;

namespace internal {
class AttentionPlan;
// Returns the order in which attention visits a mask, computed on first use and cached. Copies of the mask share it.
const AttentionPlan& plan_of(const BlockMask& mask);
}  // namespace internal

class BlockMask : public DescribedObject {
 public:
  static constexpr std::int64_t kDefaultBlockSize = 128;

  // Creates a mask from lists of the blocks that each row of query blocks uses. Leading dimensions may be omitted.
  // Without mask_mod, partial blocks count as full; without seq_lengths, the lengths are what the blocks cover. Throws
  // BlockMaskError if the lists do not fit each other or contain an index out of range.
  static BlockMask from_kv_blocks(const BlockList& kv, const std::optional<BlockList>& full_kv = std::nullopt,
                                  BlockSize block_size = kDefaultBlockSize, MaskMod mask_mod = nullptr,
                                  std::optional<SeqLengths> seq_lengths = std::nullopt);

  // Returns [batch, heads, queries, keys], without the leading dimensions that the lists do not have.
  std::vector<std::int64_t> shape() const;
  std::int64_t batch() const;
  std::int64_t heads() const;
  const SeqLengths& seq_lengths() const { return seq_lengths_; }
  const BlockSize& block_size() const { return block_size_; }

  // Partial blocks of each row of query blocks; full blocks, if they are listed separately; and the transposed lists q
  // and full_q: the query blocks that use each block of keys.
  const at::Tensor& kv_num_blocks() const { return kv_.num_blocks; }
  const at::Tensor& kv_indices() const { return kv_.indices; }
  const std::optional<BlockList>& full_kv() const { return full_kv_; }
  const BlockList& q() const { return q_; }
  const std::optional<BlockList>& full_q() const { return full_q_; }

  // Returns the mask function, for batch indices of this mask. Returns noop_mask if the mask has no function.
  MaskMod mask_mod() const;
  bool has_mask_mod() const { return mask_mod_ != nullptr; }

  // Returns int32 [batch, heads, rows, columns] with 1 for each block that is present, full or partial, and 0
  // otherwise.
  at::Tensor to_dense() const;
  // Returns the dense mask, bool [batch, heads, queries, keys].
  at::Tensor to_mask() const;
  // Returns the percentage of the mask that is not covered by blocks. Blocks that extend beyond the sequence count with
  // their full size, as in PyTorch, so the percentage can be negative.
  double sparsity() const;

  // Returns a drawing of the blocks of each batch row and head: █ where all blocks of a cell are present, ░ where some
  // are. A drawing has at most `grid` cells in each direction, and there are at most `limit` drawings.
  std::string to_string(std::int64_t grid = 20, std::int64_t limit = 4) const;

  BlockMask to(at::Device device) const;

  // Returns a part of the mask, selected by up to three indices for batch, head and row of query blocks: integers,
  // slices or tensors of integers. All dimensions are kept. The mask function still receives the indices of the whole
  // mask. Throws BlockMaskError.
  BlockMask index(const std::vector<at::indexing::TensorIndex>& indices) const;

  // Split the mask along the batch into `chunks`, of which the first batch % chunks have one row more, or into chunks
  // of given sizes. A mask with batch 1 is shared by all chunks. The function of a chunk still receives the rows of the
  // whole batch. Throw BlockMaskError.
  std::vector<BlockMask> split(std::int64_t chunks) const;
  std::vector<BlockMask> split(at::IntArrayRef sizes) const;
  // Concatenates the rows of chunks. Chunks of one split give the mask that was split, with its function; several
  // copies of one mask with batch 1 give that mask. Throws BlockMaskError.
  static BlockMask merge(std::span<const BlockMask> chunks);

  // Returns "block mask of shape [4, 1, 2048, 2048]", for errors.
  std::string description() const override;

  // Returns all properties that masks must have in common to be merged, as text.
  std::string form() const;

  // Convert from and to values. from_ivalue throws BlockMaskError if the value is not a block mask.
  static bool is(const c10::IValue& value);
  static const BlockMask& from_ivalue(const c10::IValue& value);
  c10::IValue to_ivalue() const;

 private:
  friend const internal::AttentionPlan& internal::plan_of(const BlockMask& mask);
  // The plan of a mask and its copies, computed by the first that needs it.
  struct LazyPlan;

  BlockMask(BlockList kv, std::optional<BlockList> full_kv, BlockSize block_size, SeqLengths seq_lengths,
            std::shared_ptr<const MaskMod> mask_mod, std::int64_t first_row);

  bool shares_all_with(const BlockMask& other) const;

  BlockList kv_;
  std::optional<BlockList> full_kv_;
  BlockList q_;
  std::optional<BlockList> full_q_;
  BlockSize block_size_;
  SeqLengths seq_lengths_;
  // The function of the mask that this chunk was split from, and the row of that mask which is row 0 here.
  std::shared_ptr<const MaskMod> mask_mod_;
  std::int64_t first_row_ = 0;
  std::shared_ptr<LazyPlan> plan_;
};

// Evaluates mask_mod on all indices, a few rows at a time, and creates the mask of the allowed pairs. Batch and heads
// are 1 if not given. Throws BlockMaskError for a size below 1, and what evaluate_mask_mod throws.
BlockMask create_block_mask(const MaskMod& mask_mod, std::optional<std::int64_t> batch,
                            std::optional<std::int64_t> heads, std::int64_t q_len, std::int64_t kv_len,
                            BlockSize block_size = BlockMask::kDefaultBlockSize, at::Device device = at::kCPU);

// Prints the shape, the sparsity and the drawing.
std::ostream& operator<<(std::ostream& out, const BlockMask& mask);

}  // namespace penstock
