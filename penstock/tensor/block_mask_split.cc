// Parts of block masks: indexing, splitting along the batch, and merging.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>

#include "penstock/tensor/block_mask.h"

namespace penstock {
namespace {

using at::indexing::Slice;
using at::indexing::TensorIndex;

constexpr std::array<const char*, 3> kDimensions = {"batch", "head", "row of query blocks"};

std::string text_of(at::IntArrayRef sizes) {
  std::ostringstream out;
  out << sizes;
  return out.str();
}

BlockList map_list(const BlockList& list, const std::function<at::Tensor(const at::Tensor&)>& map) {
  return {map(list.num_blocks), map(list.indices)};
}

std::optional<BlockList> map_list(const std::optional<BlockList>& list,
                                  const std::function<at::Tensor(const at::Tensor&)>& map) {
  return list ? std::optional(map_list(*list, map)) : std::nullopt;
}

// What an index picks of `size` things, as int64 numbers. An integer picks one and keeps the dimension.
at::Tensor picked(const TensorIndex& index, std::size_t dimension, std::int64_t size, at::Device device) {
  const at::Tensor all = at::arange(size, at::TensorOptions(at::kLong).device(device));
  if (index.is_integer()) {
    const std::int64_t at = index.integer().expect_int();
    if (at < -size || at >= size) {
      throw BlockMaskError("BlockMask::index: " + std::string(kDimensions[dimension]) + " " + std::to_string(at) +
                           " is not among the mask's " + std::to_string(size) + ".");
    }
    return all.narrow(0, at < 0 ? at + size : at, 1);
  }
  if (index.is_slice() || index.is_tensor()) {
    const at::Tensor some = all.index({index});
    if (some.dim() == 1) return some;
  }
  throw BlockMaskError("BlockMask::index: the index of " + std::string(kDimensions[dimension]) +
                       " should be an integer, a slice or a one-dimensional tensor.");
}

// How many queries the picked rows of blocks have. The last row may be shorter than a block: only at the end can it be.
std::int64_t picked_queries(const at::Tensor& rows, const BlockMask& mask) {
  const std::int64_t block = mask.block_size().q;
  const std::int64_t last = mask.kv_num_blocks().size(-1) - 1;
  const std::int64_t last_queries = mask.seq_lengths().q - last * block;
  if (last_queries == block || rows.numel() == 0) return rows.numel() * block;
  const bool ends_so = rows[-1].item<std::int64_t>() == last;
  if ((rows.narrow(0, 0, rows.numel() - 1) == last).any().item<bool>()) {
    throw BlockMaskError("BlockMask::index: row of query blocks " + std::to_string(last) + " has " +
                         std::to_string(last_queries) + " queries and not " + std::to_string(block) +
                         "; it should be the last of those picked.");
  }
  return ends_so ? (rows.numel() - 1) * block + last_queries : rows.numel() * block;
}

// The chunks' functions side by side: each answers for its own rows. What it says of others is thrown away, but it must
// not be asked about rows that it does not have.
MaskMod side_by_side(std::vector<MaskMod> mods, std::vector<std::int64_t> sizes) {
  return [mods = std::move(mods), sizes = std::move(sizes)](const at::Tensor& b, const at::Tensor& h,
                                                            const at::Tensor& q_idx, const at::Tensor& kv_idx) {
    std::int64_t first = 0;
    at::Tensor allowed;
    for (std::size_t i = 0; i < mods.size(); ++i) {
      const at::Tensor own = mods[i]((b - first).clamp(0, sizes[i] - 1), h, q_idx, kv_idx);
      allowed = allowed.defined() ? at::where(b >= first, own, allowed) : own;
      first += sizes[i];
    }
    return allowed;
  };
}

}  // namespace

BlockMask BlockMask::index(const std::vector<TensorIndex>& indices) const {
  if (indices.size() > 3 || kv_.indices.dim() != 4) {
    throw BlockMaskError("BlockMask::index: " + std::to_string(indices.size()) + " indices into kv_indices of shape " +
                         text_of(kv_.indices.sizes()) +
                         "; there should be up to 3, of batch, head and row of query blocks, and 4 dimensions.");
  }
  const at::IntArrayRef sizes = kv_.num_blocks.sizes();
  std::array<at::Tensor, 3> picks;
  for (std::size_t i = 0; i < 3; ++i) {
    picks[i] = picked(i < indices.size() ? indices[i] : TensorIndex(Slice()), i, sizes[i], kv_.indices.device());
  }
  const auto pick = [&picks](const at::Tensor& tensor) {
    return tensor.index_select(0, picks[0]).index_select(1, picks[1]).index_select(2, picks[2]);
  };
  std::shared_ptr<const MaskMod> mod;
  if (mask_mod_) {
    mod = std::make_shared<const MaskMod>(
        [whole = mask_mod(), picks, block = block_size_.q](const at::Tensor& b, const at::Tensor& h,
                                                           const at::Tensor& q_idx, const at::Tensor& kv_idx) {
          const at::Tensor row = picks[2].index({q_idx.floor_divide(block)});
          return whole(picks[0].index({b}), picks[1].index({h}), row * block + q_idx.remainder(block), kv_idx);
        });
  }
  const SeqLengths lengths = {.q = picked_queries(picks[2], *this), .kv = seq_lengths_.kv};
  return {map_list(kv_, pick), map_list(full_kv_, pick), block_size_, lengths, std::move(mod), 0};
}

std::vector<BlockMask> BlockMask::split(std::int64_t chunks) const {
  if (chunks < 1) {
    throw BlockMaskError("BlockMask::split: into " + std::to_string(chunks) + " chunks; there should be at least 1.");
  }
  if (batch() > 1 && batch() < chunks) {
    throw BlockMaskError("BlockMask::split: a batch of " + std::to_string(batch()) + " is too small for " +
                         std::to_string(chunks) + " chunks.");
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(chunks), batch() / chunks);
  std::for_each_n(sizes.begin(), batch() % chunks, [](std::int64_t& size) { ++size; });
  return split(sizes);
}

std::vector<BlockMask> BlockMask::split(at::IntArrayRef sizes) const {
  // A mask with batch 1 stands for any number of rows.
  if (batch() == 1) return std::vector<BlockMask>(sizes.size(), *this);
  const std::int64_t rows = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (rows != batch() || std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < 1; })) {
    throw BlockMaskError("BlockMask::split: chunks of " + text_of(sizes) +
                         " rows; they should add up to the batch of " + std::to_string(batch()) +
                         ", and each be at least 1.");
  }
  std::vector<BlockMask> chunks;
  std::int64_t first = 0;
  for (const std::int64_t size : sizes) {
    const auto narrow = [first, size](const at::Tensor& tensor) { return tensor.narrow(0, first, size); };
    chunks.push_back(BlockMask(map_list(kv_, narrow), map_list(full_kv_, narrow), block_size_, seq_lengths_, mask_mod_,
                               first_row_ + first));
    first += size;
  }
  return chunks;
}

bool BlockMask::shares_all_with(const BlockMask& other) const {
  return kv_.num_blocks.is_same(other.kv_.num_blocks) && kv_.indices.is_same(other.kv_.indices) &&
         mask_mod_ == other.mask_mod_ && first_row_ == other.first_row_;
}

std::string BlockMask::form() const {
  return std::to_string(heads()) + " heads, " + std::to_string(seq_lengths_.q) + " queries and " +
         std::to_string(seq_lengths_.kv) + " keys in blocks of " + std::to_string(block_size_.q) + " × " +
         std::to_string(block_size_.kv) + (full_kv_ ? " with" : " without") + " full blocks on " +
         kv_.indices.device().str();
}

BlockMask BlockMask::merge(std::span<const BlockMask> chunks) {
  if (chunks.empty()) throw BlockMaskError("BlockMask::merge: there are no chunks; there should be at least 1.");
  const BlockMask& first = chunks.front();
  bool shared = first.batch() == 1;
  bool of_one_split = true;
  std::int64_t rows = 0;
  std::vector<MaskMod> mods;
  std::vector<std::int64_t> sizes;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const BlockMask& chunk = chunks[i];
    if (chunk.form() != first.form()) {
      throw BlockMaskError("BlockMask::merge: chunk " + std::to_string(i) + " has " + chunk.form() +
                           ", and chunk 0 has " + first.form() + "; they should have the same.");
    }
    shared = shared && chunk.shares_all_with(first);
    of_one_split = of_one_split && chunk.mask_mod_ == first.mask_mod_ &&
                   (!chunk.mask_mod_ || chunk.first_row_ == first.first_row_ + rows);
    mods.push_back(chunk.mask_mod());
    sizes.push_back(chunk.batch());
    rows += chunk.batch();
  }
  if (shared) return first;

  const auto join = [chunks](const auto& list_of) {
    BlockList joined;
    for (at::Tensor BlockList::* part : {&BlockList::num_blocks, &BlockList::indices}) {
      std::vector<at::Tensor> parts;
      for (const BlockMask& chunk : chunks) {
        const at::Tensor& own = list_of(chunk).*part;
        // Leading dimensions that were left out are 1.
        parts.push_back(chunk.kv_.indices.dim() == 4 ? own : own.unsqueeze(0));
        if (chunk.kv_.indices.dim() == 2) parts.back() = parts.back().unsqueeze(0);
      }
      joined.*part = at::cat(parts, 0);
    }
    return joined;
  };
  std::optional<BlockList> full;
  if (first.full_kv_) full = join([](const BlockMask& chunk) -> const BlockList& { return *chunk.full_kv_; });
  auto mod =
      of_one_split ? first.mask_mod_ : std::make_shared<const MaskMod>(side_by_side(std::move(mods), std::move(sizes)));
  return {join([](const BlockMask& chunk) -> const BlockList& { return chunk.kv_; }),
          std::move(full),
          first.block_size_,
          first.seq_lengths_,
          std::move(mod),
          of_one_split ? first.first_row_ : 0};
}

}  // namespace penstock
