// Indexing, splitting and merging of block masks.
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
#include <string>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/block_mask.h"

namespace penstock {

using internal::concat;
using internal::shape_text;

namespace {

using at::indexing::Slice;
using at::indexing::TensorIndex;

constexpr std::array<const char*, 3> kDimensions = {"batch", "head", "row of query blocks"};

BlockList map_list(const BlockList& list, const std::function<at::Tensor(const at::Tensor&)>& map) {
  return {map(list.num_blocks), map(list.indices)};
}

std::optional<BlockList> map_list(const std::optional<BlockList>& list,
                                  const std::function<at::Tensor(const at::Tensor&)>& map) {
  return list ? std::optional(map_list(*list, map)) : std::nullopt;
}

// Returns the indices in [0, size) that an index selects, as int64 numbers. An integer selects one and keeps the
// dimension.
at::Tensor selected(const TensorIndex& index, std::size_t dimension, std::int64_t size, at::Device device) {
  const at::Tensor all = at::arange(size, at::TensorOptions(at::kLong).device(device));
  if (index.is_integer()) {
    const std::int64_t position = index.integer().expect_int();
    if (position < -size || position >= size) {
      throw BlockMaskError(
          concat("BlockMask::index: ", kDimensions[dimension], " ", position, " is not among the mask's ", size, "."));
    }
    return all.narrow(0, position < 0 ? position + size : position, 1);
  }
  if (index.is_slice() || index.is_tensor()) {
    const at::Tensor some = all.index({index});
    if (some.dim() == 1) return some;
  }
  throw BlockMaskError(concat("BlockMask::index: the index of ", kDimensions[dimension],
                              " should be an integer, a slice or a one-dimensional tensor."));
}

// Returns the number of queries in the selected rows of blocks. The last row of the mask may be shorter than a block,
// and may then be selected only as the last.
std::int64_t selected_queries(const at::Tensor& rows, const BlockMask& mask) {
  const std::int64_t block = mask.block_size().q;
  const std::int64_t last = mask.kv_num_blocks().size(-1) - 1;
  const std::int64_t last_queries = mask.seq_lengths().q - last * block;
  if (last_queries == block || rows.numel() == 0) return rows.numel() * block;
  const bool ends_short = rows[-1].item<std::int64_t>() == last;
  if ((rows.narrow(0, 0, rows.numel() - 1) == last).any().item<bool>()) {
    throw BlockMaskError(concat("BlockMask::index: row of query blocks ", last, " has ", last_queries,
                                " queries and not ", block, "; it should be the last of the selected rows."));
  }
  return ends_short ? (rows.numel() - 1) * block + last_queries : rows.numel() * block;
}

// Returns a function that calls each chunk's function for the chunk's rows. Every function is evaluated on all rows and
// the results for others are discarded, so rows are clamped to those that the chunk has.
MaskMod concatenated(std::vector<MaskMod> mods, std::vector<std::int64_t> sizes) {
  return [mods = std::move(mods), sizes = std::move(sizes)](const at::Tensor& b, const at::Tensor& h,
                                                            const at::Tensor& q_idx, const at::Tensor& kv_idx) {
    std::int64_t first = 0;
    at::Tensor allowed;
    for (std::size_t i = 0; i < mods.size(); ++i) {
      const at::Tensor in_chunk = mods[i]((b - first).clamp(0, sizes[i] - 1), h, q_idx, kv_idx);
      allowed = allowed.defined() ? at::where(b >= first, in_chunk, allowed) : in_chunk;
      first += sizes[i];
    }
    return allowed;
  };
}

}  // namespace

BlockMask BlockMask::index(const std::vector<TensorIndex>& indices) const {
  if (indices.size() > 3 || kv_.indices.dim() != 4) {
    throw BlockMaskError(concat(
        "BlockMask::index: ", indices.size(), " indices into kv_indices of shape ", shape_text(kv_.indices.sizes()),
        "; there should be up to 3, of batch, head and row of query blocks, and 4 dimensions."));
  }
  const at::IntArrayRef sizes = kv_.num_blocks.sizes();
  std::array<at::Tensor, 3> selection;
  for (std::size_t i = 0; i < 3; ++i) {
    selection[i] = selected(i < indices.size() ? indices[i] : TensorIndex(Slice()), i, sizes[i], kv_.indices.device());
  }
  const auto select = [&selection](const at::Tensor& tensor) {
    return tensor.index_select(0, selection[0]).index_select(1, selection[1]).index_select(2, selection[2]);
  };
  std::shared_ptr<const MaskMod> mod;
  if (mask_mod_) {
    mod = std::make_shared<const MaskMod>(
        [whole = mask_mod(), selection, block = block_size_.q](const at::Tensor& b, const at::Tensor& h,
                                                               const at::Tensor& q_idx, const at::Tensor& kv_idx) {
          const at::Tensor row = selection[2].index({q_idx.floor_divide(block)});
          return whole(selection[0].index({b}), selection[1].index({h}), row * block + q_idx.remainder(block), kv_idx);
        });
  }
  const SeqLengths lengths = {.q = selected_queries(selection[2], *this), .kv = seq_lengths_.kv};
  return {map_list(kv_, select), map_list(full_kv_, select), block_size_, lengths, std::move(mod), 0};
}

std::vector<BlockMask> BlockMask::split(std::int64_t chunks) const {
  if (chunks < 1) {
    throw BlockMaskError(concat("BlockMask::split: into ", chunks, " chunks; there should be at least 1."));
  }
  if (batch() > 1 && batch() < chunks) {
    throw BlockMaskError(concat("BlockMask::split: a batch of ", batch(), " is too small for ", chunks, " chunks."));
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(chunks), batch() / chunks);
  std::for_each_n(sizes.begin(), batch() % chunks, [](std::int64_t& size) { ++size; });
  return split(sizes);
}

std::vector<BlockMask> BlockMask::split(at::IntArrayRef sizes) const {
  // A mask with batch 1 applies to any number of rows.
  if (batch() == 1) return std::vector<BlockMask>(sizes.size(), *this);
  const std::int64_t rows = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (rows != batch() || std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < 1; })) {
    throw BlockMaskError(concat("BlockMask::split: chunks of ", shape_text(sizes),
                                " rows; they should add up to the batch of ", batch(), ", and each be at least 1."));
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
      throw BlockMaskError(concat("BlockMask::merge: chunk ", i, " has ", chunk.form(), ", and chunk 0 has ",
                                  first.form(), "; they should have the same."));
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
        const at::Tensor& list = list_of(chunk).*part;
        // Omitted leading dimensions have size 1.
        parts.push_back(chunk.kv_.indices.dim() == 4 ? list : list.unsqueeze(0));
        if (chunk.kv_.indices.dim() == 2) parts.back() = parts.back().unsqueeze(0);
      }
      joined.*part = at::cat(parts, 0);
    }
    return joined;
  };
  std::optional<BlockList> full;
  if (first.full_kv_) full = join([](const BlockMask& chunk) -> const BlockList& { return *chunk.full_kv_; });
  auto mod =
      of_one_split ? first.mask_mod_ : std::make_shared<const MaskMod>(concatenated(std::move(mods), std::move(sizes)));
  return {join([](const BlockMask& chunk) -> const BlockList& { return chunk.kv_; }),
          std::move(full),
          first.block_size_,
          first.seq_lengths_,
          std::move(mod),
          of_one_split ? first.first_row_ : 0};
}

}  // namespace penstock
