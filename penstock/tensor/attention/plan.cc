#include "penstock/tensor/attention/plan.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "penstock/tensor/block_mask.h"

namespace penstock::internal {
namespace {

constexpr std::int64_t kBits = 32;
// Number of (query, key) pairs on which the mask function is evaluated in one call.
constexpr std::int64_t kPairsAtOnce = 1 << 20;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Returns the bits of word number `word` that belong to a row of `columns`.
std::uint32_t used_bits(std::int64_t columns, std::int64_t word) {
  const std::int64_t bits = std::min(kBits, columns - word * kBits);
  return bits == kBits ? ~std::uint32_t{0} : (std::uint32_t{1} << bits) - 1;
}

enum class Block : std::uint8_t { None, Partial, Full };

// The kind of each block of a mask, [batch * heads][row][column].
class Grid {
 public:
  explicit Grid(const BlockMask& mask)
      : rows_(static_cast<std::size_t>(mask.kv_indices().size(-2))),
        columns_(static_cast<std::size_t>(mask.kv_indices().size(-1))),
        blocks_(static_cast<std::size_t>(mask.kv_indices().numel()), Block::None) {
    mark(mask.kv_num_blocks(), mask.kv_indices(), mask.has_mask_mod() ? Block::Partial : Block::Full);
    if (mask.full_kv()) mark(mask.full_kv()->num_blocks, mask.full_kv()->indices, Block::Full);
  }

  std::size_t rows() const { return rows_; }
  std::span<const Block> row(std::size_t batch_and_head, std::size_t row) const {
    return std::span(blocks_).subspan((batch_and_head * rows_ + row) * columns_, columns_);
  }

 private:
  void mark(const at::Tensor& num_blocks, const at::Tensor& indices, Block block) {
    const at::Tensor counts = num_blocks.to(at::kLong).contiguous();
    const at::Tensor columns = indices.to(at::kLong).contiguous();
    const auto* const count = counts.const_data_ptr<std::int64_t>();
    const auto* const column = columns.const_data_ptr<std::int64_t>();
    for (std::size_t row = 0; row < static_cast<std::size_t>(counts.numel()); ++row) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(count[row]); ++i) {
        const auto position = static_cast<std::size_t>(column[row * columns_ + i]);
        // The lists were checked when the mask was made, but their tensors may have changed since.
        if (i >= columns_ || position >= columns_) throw BlockMaskError("BlockMask: its lists of blocks have changed.");
        blocks_[row * columns_ + position] = block;
      }
    }
  }

  std::size_t rows_;
  std::size_t columns_;
  std::vector<Block> blocks_;
};

// Packs a row of bools into bits.
void pack(const bool* allowed, std::int64_t columns, std::uint32_t* words) {
  for (std::int64_t first = 0; first < columns; first += kBits) {
    std::uint32_t word = 0;
    const std::int64_t count = std::min(kBits, columns - first);
    for (std::int64_t i = 0; i < count; ++i) word |= std::uint32_t{allowed[first + i]} << i;
    words[first / kBits] = word;
  }
}

}  // namespace

// Evaluates the mask function on tiles, and stores each distinct bit mask once.
class AttentionPlan::Tiles {
 public:
  Tiles(const BlockMask& mask, std::vector<std::uint32_t>& words)
      : mask_mod_(mask.mask_mod()),
        q_(at::arange(mask.seq_lengths().q, at::kLong)),
        kv_(at::arange(mask.seq_lengths().kv, at::kLong)),
        words_(words) {}

  // Appends a piece for each tile of `width` keys in [first_key, end_key), of which the last may be narrower.
  void evaluate(std::int64_t batch, std::int64_t head, std::int64_t first_row, std::int64_t end_row,
                std::int64_t first_key, std::int64_t end_key, std::int64_t width, std::vector<Piece>& pieces) {
    const std::int64_t rows = end_row - first_row;
    const std::int64_t keys = end_key - first_key;
    const auto tiles = static_cast<std::size_t>(ceil_div(keys, width));
    const std::int64_t words_per_row = ceil_div(std::min(width, keys), kBits);
    std::vector<std::vector<std::uint32_t>> packed(tiles);
    for (auto& words : packed) words.resize(static_cast<std::size_t>(rows * words_per_row));
    const std::int64_t rows_at_once = std::max<std::int64_t>(1, kPairsAtOnce / keys);
    for (std::int64_t done = 0; done < rows; done += rows_at_once) {
      const std::int64_t now = std::min(rows_at_once, rows - done);
      const at::Tensor allowed =
          evaluate_mask_mod(mask_mod_, at::arange(batch, batch + 1, at::kLong), at::arange(head, head + 1, at::kLong),
                            q_.narrow(0, first_row + done, now), kv_.narrow(0, first_key, keys))
              .expand({1, 1, now, keys})
              .contiguous();
      const bool* const answers = allowed.const_data_ptr<bool>();
      for (std::int64_t row = 0; row < now; ++row) {
        for (std::size_t tile = 0; tile < tiles; ++tile) {
          const std::int64_t column = static_cast<std::int64_t>(tile) * width;
          pack(answers + row * keys + column, std::min(width, keys - column),
               packed[tile].data() + (done + row) * words_per_row);
        }
      }
    }
    for (std::size_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t column = static_cast<std::int64_t>(tile) * width;
      pieces.push_back({.first_key = first_key + column,
                        .keys = std::min(width, keys - column),
                        .masked = true,
                        .words = intern(packed[tile]),
                        .words_per_row = words_per_row});
    }
  }

 private:
  // Returns the position of the words in words_, and appends them if they are not there yet.
  std::size_t intern(const std::vector<std::uint32_t>& tile) {
    const auto bytes_of = [](std::span<const std::uint32_t> words) {
      const auto bytes = std::as_bytes(words);
      return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    const std::size_t hash = std::hash<std::string_view>{}(bytes_of(tile));
    const auto [begin, end] = known_.equal_range(hash);
    for (auto known = begin; known != end; ++known) {
      const std::size_t position = known->second;
      if (position + tile.size() <= words_.size() &&
          std::equal(tile.begin(), tile.end(), words_.begin() + static_cast<std::ptrdiff_t>(position)))
        return position;
    }
    const std::size_t position = words_.size();
    words_.insert(words_.end(), tile.begin(), tile.end());
    known_.emplace(hash, position);
    return position;
  }

  MaskMod mask_mod_;
  at::Tensor q_;
  at::Tensor kv_;
  std::vector<std::uint32_t>& words_;
  std::unordered_multimap<std::size_t, std::size_t> known_;
};

AttentionPlan::AttentionPlan(std::int64_t q_len, std::int64_t kv_len) {
  const Piece all = {.first_key = 0, .keys = kv_len};
  add_strips(0, q_len, std::span(&all, 1));
}

AttentionPlan::AttentionPlan(const BlockMask& mask) : batch_(mask.batch()), heads_(mask.heads()) {
  const Grid grid(mask);
  Tiles tiles(mask, words_);
  const auto [q_block, kv_block] = mask.block_size();
  const auto [q_len, kv_len] = mask.seq_lengths();
  std::vector<Piece> pieces;
  for (std::int64_t index = 0; index < batch_ * heads_; ++index) {
    for (std::size_t row = 0; row < grid.rows(); ++row) {
      const std::int64_t first_row = static_cast<std::int64_t>(row) * q_block;
      const std::int64_t end_row = std::min(first_row + q_block, q_len);
      const std::span<const Block> blocks = grid.row(static_cast<std::size_t>(index), row);
      pieces.clear();
      for (std::size_t column = 0; column < blocks.size();) {
        const Block kind = blocks[column];
        // Join adjacent blocks of a kind, up to the limit of one call of the mask function.
        std::size_t end = column + 1;
        const auto limit =
            static_cast<std::size_t>(kPairsAtOnce / (std::min(kv_block, kv_len) * (end_row - first_row)));
        while (end < blocks.size() && blocks[end] == kind && end - column < limit) ++end;
        const std::int64_t first_key = static_cast<std::int64_t>(column) * kv_block;
        const std::int64_t end_key = std::min(static_cast<std::int64_t>(end) * kv_block, kv_len);
        if (kind == Block::Full) pieces.push_back({.first_key = first_key, .keys = end_key - first_key});
        if (kind == Block::Partial) {
          tiles.evaluate(index / heads_, index % heads_, first_row, end_row, first_key, end_key, kv_block, pieces);
        }
        column = end;
      }
      add_strips(first_row, end_row, pieces);
    }
  }
}

// Returns the keys of a tile that some of its rows use, beginning at a multiple of 32, and without bits if all pairs
// are allowed.
AttentionPlan::Piece AttentionPlan::trimmed(const Piece& tile, std::int64_t first_row, std::int64_t rows) const {
  std::int64_t begin = tile.words_per_row;
  std::int64_t end = 0;
  bool whole = true;
  const std::size_t words = tile.words + static_cast<std::size_t>(first_row * tile.words_per_row);
  const auto word_at = [&](std::int64_t row, std::int64_t word) {
    return words_[words + static_cast<std::size_t>(row * tile.words_per_row + word)];
  };
  const std::int64_t used_words = ceil_div(tile.keys, kBits);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t word = 0; word < used_words; ++word) {
      if (word_at(row, word) == 0) continue;
      begin = std::min(begin, word);
      end = std::max(end, word + 1);
    }
  }
  for (std::int64_t row = 0; row < rows && whole; ++row) {
    for (std::int64_t word = begin; word < end && whole; ++word) {
      whole = word_at(row, word) == used_bits(tile.keys, word);
    }
  }
  const std::int64_t first_column = std::min(begin * kBits, tile.keys);
  return {.first_key = tile.first_key + first_column,
          .keys = std::max<std::int64_t>(0, std::min(end * kBits, tile.keys) - first_column),
          .masked = !whole,
          .words = words + static_cast<std::size_t>(begin),
          .words_per_row = tile.words_per_row};
}

// Adds strips of about equal height for rows that have the same pieces.
void AttentionPlan::add_strips(std::int64_t first_row, std::int64_t end_row, std::span<const Piece> pieces) {
  const std::int64_t all_rows = end_row - first_row;
  const std::int64_t count = ceil_div(all_rows, kMaxRows);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t begin = all_rows * i / count;
    const std::int64_t end = all_rows * (i + 1) / count;
    Strip strip = {.first_row = first_row + begin, .rows = end - begin, .first_run = runs_.size()};
    for (const Piece& piece : pieces) add_piece(strip, piece.masked ? trimmed(piece, begin, strip.rows) : piece);
    strips_.push_back(strip);
  }
}

// Appends a piece to the strip's last run if it is adjacent and fits, and to as many new runs as needed otherwise.
void AttentionPlan::add_piece(Strip& strip, const Piece& piece) {
  static_assert(kMaxKeys % kBits == 0);
  for (std::int64_t done = 0; done < piece.keys;) {
    const std::int64_t first_key = piece.first_key + done;
    std::int64_t now = std::min(piece.keys - done, kMaxKeys);
    const bool continues = strip.runs > 0 && runs_.back().first_key + runs_.back().keys == first_key;
    if (!continues || runs_.back().keys + now > kMaxKeys) {
      runs_.push_back({.first_key = first_key, .first_part = parts_.size()});
      ++strip.runs;
    }
    Run& run = runs_.back();
    if (piece.masked) {
      parts_.push_back({.first_column = run.keys,
                        .columns = now,
                        .words = piece.words + static_cast<std::size_t>(done / kBits),
                        .words_per_row = piece.words_per_row});
      ++run.parts;
    }
    run.keys += now;
    done += now;
  }
}

std::span<const AttentionPlan::Strip> AttentionPlan::strips(std::int64_t batch, std::int64_t head) const {
  const std::size_t count = strips_.size() / static_cast<std::size_t>(batch_ * heads_);
  const std::int64_t index = (batch_ == 1 ? 0 : batch) * heads_ + (heads_ == 1 ? 0 : head);
  return std::span(strips_).subspan(static_cast<std::size_t>(index) * count, count);
}

RowBits AttentionPlan::part(const Run& run, std::size_t i) const {
  const Part& part = parts_[run.first_part + i];
  return {.words = words_.data() + part.words,
          .words_per_row = part.words_per_row,
          .first_column = part.first_column,
          .columns = part.columns};
}

}  // namespace penstock::internal
