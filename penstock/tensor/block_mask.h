// A BlockMask says which queries may attend to which keys, block by block: a block that no query of it may use is left
// out, a full one is used whole, and within a partial one the mask function decides. Attention then works on the blocks
// that are there, and never sees the others.
//
//   BlockMask mask = create_block_mask(causal, /*batch=*/std::nullopt, /*heads=*/std::nullopt, 2048, 2048);
//   at::Tensor out = flex_attention(query, key, value, {}, mask);
//   c10::IValue value = mask.to_ivalue();               // travels like a tensor, and is a leaf of a nested value
//   std::vector<BlockMask> chunks = mask.split(4);      // for microbatches; BlockMask::merge undoes it
//
// A mask with batch 1, or with one head, is the mask of every row, or of every head; its function then sees index 0.
// What the function captures is not to change while the mask lives: what attention learns from it is kept with the
// mask. Threads may share a mask.
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

struct BlockSize {
  BlockSize(std::int64_t both) : q(both), kv(both) {}  // NOLINT(google-explicit-constructor): a number is a square
  BlockSize(std::int64_t q_size, std::int64_t kv_size) : q(q_size), kv(kv_size) {}
  friend bool operator==(const BlockSize&, const BlockSize&) = default;

  std::int64_t q;
  std::int64_t kv;
};

struct SeqLengths {
  std::int64_t q = 0;
  std::int64_t kv = 0;
  friend bool operator==(const SeqLengths&, const SeqLengths&) = default;
};

// For each row of blocks how many there are in it, and which, the first that many entries of indices; what follows them
// means nothing. [batch, heads, rows] and [batch, heads, rows, columns], int32.
struct BlockList {
  at::Tensor num_blocks;
  at::Tensor indices;
};

namespace internal {
class AttentionPlan;
}

class BlockMask : public DescribedObject {
 public:
  static constexpr std::int64_t kDefaultBlockSize = 128;

  // From lists of the blocks that each row of query blocks uses. Leading dimensions may be left out. Without a function
  // partial blocks are used whole; without lengths they are what the blocks cover. Throws BlockMaskError when the lists
  // do not fit each other or name a block that is not there.
  static BlockMask from_kv_blocks(const BlockList& kv, const std::optional<BlockList>& full_kv = std::nullopt,
                                  BlockSize block_size = kDefaultBlockSize, MaskMod mask_mod = nullptr,
                                  std::optional<SeqLengths> seq_lengths = std::nullopt);

  // [batch, heads, queries, keys]; without the leading dimensions that the lists do not have.
  std::vector<std::int64_t> shape() const;
  std::int64_t batch() const;
  std::int64_t heads() const;
  const SeqLengths& seq_lengths() const { return seq_lengths_; }
  const BlockSize& block_size() const { return block_size_; }

  // Partial blocks of each row of query blocks; full ones, where they are told apart; and both the other way: the query
  // blocks that use a block of keys.
  const at::Tensor& kv_num_blocks() const { return kv_.num_blocks; }
  const at::Tensor& kv_indices() const { return kv_.indices; }
  const std::optional<BlockList>& full_kv() const { return full_kv_; }
  const BlockList& q() const { return q_; }
  const std::optional<BlockList>& full_q() const { return full_q_; }

  // Sees the rows of this mask's batch. noop_mask when the mask was made without one.
  MaskMod mask_mod() const;
  bool has_mask_mod() const { return mask_mod_ != nullptr; }

  // Which blocks there are, full or partial, as int32 ones and zeros [batch, heads, rows, columns].
  at::Tensor to_dense() const;
  // What each query may attend to, bool [batch, heads, queries, keys].
  at::Tensor to_mask() const;
  // The percentage of the mask that no block covers. Blocks that reach over its edge count whole, so that it can be
  // below zero.
  double sparsity() const;

  // A picture of the blocks of each batch row and head: █ where a cell's blocks are all there, ░ where some are. At
  // most `grid` cells high and wide, and at most `limit` pictures.
  std::string to_string(std::int64_t grid = 20, std::int64_t limit = 4) const;

  BlockMask to(at::Device device) const;

  // The part of the mask at up to three indices, of batch, head and row of query blocks: integers, slices or tensors of
  // integers. All dimensions stay. The function of the part sees the indices of the whole. Throws BlockMaskError.
  BlockMask index(const std::vector<at::indexing::TensorIndex>& indices) const;

  // Chunks along the batch, the first batch % chunks of them longer by one, or of given sizes. A mask with batch 1 is
  // shared by all. The function of a chunk sees the rows of the whole batch. Throws BlockMaskError.
  std::vector<BlockMask> split(std::int64_t chunks) const;
  std::vector<BlockMask> split(at::IntArrayRef sizes) const;
  // One mask of all chunks' rows, in order. Chunks of one split give what they were split from; one mask several times
  // with batch 1 was shared, and stays what it is. Throws BlockMaskError.
  static BlockMask merge(std::span<const BlockMask> chunks);

  // "block mask of shape [4, 1, 2048, 2048]", for errors.
  std::string description() const override;

  // All that chunks of one mask have in common, in words: masks of one form can be merged.
  std::string form() const;

  // Whether a value is a block mask; the mask that it is (throws BlockMaskError if none); and a value that is this one.
  static bool is(const c10::IValue& value);
  static const BlockMask& from_ivalue(const c10::IValue& value);
  c10::IValue to_ivalue() const;

  // What attention makes of the mask, made on first use and kept. Copies of a mask share it.
  const AttentionPlan& plan() const;

 private:
  // Made once for a mask and its copies.
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
  // What a chunk was split from has its function; the chunk's row 0 is that one's row first_row_.
  std::shared_ptr<const MaskMod> mask_mod_;
  std::int64_t first_row_ = 0;
  std::shared_ptr<LazyPlan> plan_;
};

// Asks mask_mod for all indices, a few rows at a time, and makes the mask of what it allows. Without a batch or heads
// it is 1. Throws BlockMaskError for a size below 1 or a negative length, and what ask_mask_mod throws.
BlockMask create_block_mask(const MaskMod& mask_mod, std::optional<std::int64_t> batch,
                            std::optional<std::int64_t> heads, std::int64_t q_len, std::int64_t kv_len,
                            BlockSize block_size = BlockMask::kDefaultBlockSize, at::Device device = at::kCPU);

// The shape, the sparsity and the picture.
std::ostream& operator<<(std::ostream& out, const BlockMask& mask);

}  // namespace penstock
