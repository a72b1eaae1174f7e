// The order in which attention visits a mask: strips of adjacent queries; for each strip the runs of adjacent keys that
// some query of the strip may attend to; and for each run the parts in which only some pairs are allowed, as bit masks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "penstock/tensor/attention/rows.h"

namespace penstock {
class BlockMask;
}

namespace penstock::internal {

// Computed once for a mask, and immutable afterwards. Equal bit masks are stored once, so that the memory of a plan
// grows with the number of blocks and not with the square of the sequence length.
class AttentionPlan {
 public:
  // Limits of a strip and of a run, which bound the scores in memory at a time.
  static constexpr std::int64_t kMaxRows = 64;
  static constexpr std::int64_t kMaxKeys = 512;

  struct Strip {
    std::int64_t first_row = 0;
    std::int64_t rows = 0;
    std::size_t first_run = 0;
    std::size_t runs = 0;
  };
  struct Run {
    std::int64_t first_key = 0;
    std::int64_t keys = 0;
    std::size_t first_part = 0;
    std::size_t parts = 0;
  };

  // Plans attention without a mask.
  AttentionPlan(std::int64_t q_len, std::int64_t kv_len);
  // Evaluates the mask function on each partial block. Throws BlockMaskError, and what the function throws.
  explicit AttentionPlan(const BlockMask& mask);

  // Returns the strips of a batch row and a head, in the order of queries.
  std::span<const Strip> strips(std::int64_t batch, std::int64_t head) const;
  std::span<const Run> runs(const Strip& strip) const { return std::span(runs_).subspan(strip.first_run, strip.runs); }
  // Number of parts of a run, and the bit mask of one of them.
  std::size_t parts(const Run& run) const { return run.parts; }
  RowBits part(const Run& run, std::size_t i) const;

 private:
  // Adjacent keys of a strip, with a bit mask unless every query may attend to all of them.
  struct Piece {
    std::int64_t first_key = 0;
    std::int64_t keys = 0;
    bool masked = false;
    std::size_t words = 0;
    std::int64_t words_per_row = 0;
  };
  struct Part {
    std::int64_t first_column = 0;
    std::int64_t columns = 0;
    std::size_t words = 0;
    std::int64_t words_per_row = 0;
  };
  class Tiles;

  Piece trimmed(const Piece& tile, std::int64_t first_row, std::int64_t rows) const;
  void add_strips(std::int64_t first_row, std::int64_t end_row, std::span<const Piece> pieces);
  void add_piece(Strip& strip, const Piece& piece);

  std::int64_t batch_ = 1;
  std::int64_t heads_ = 1;
  std::vector<Strip> strips_;
  std::vector<Run> runs_;
  std::vector<Part> parts_;
  std::vector<std::uint32_t> words_;
};

}  // namespace penstock::internal
