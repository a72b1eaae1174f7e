// How attention walks through a mask: strips of queries, for each the runs of adjacent keys that some query of the
// strip may attend to, and for each run the parts of it in which not every query may. Made once for a mask. Equal parts
// of a mask are kept once, a bit for each pair of query and key, so that a plan grows with the number of blocks.
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

class AttentionPlan {
 public:
  // No strip has more rows, no run more keys: so much of the scores exists at a time.
  static constexpr std::int64_t kMostRows = 64;
  static constexpr std::int64_t kMostKeys = 512;

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

  // Every query attends to every key.
  AttentionPlan(std::int64_t q_len, std::int64_t kv_len);
  // Asks the mask's function about each partial block. Throws what that throws, and BlockMaskError.
  explicit AttentionPlan(const BlockMask& mask);

  // All queries of a batch row and a head, in order.
  std::span<const Strip> strips(std::int64_t batch, std::int64_t head) const;
  std::span<const Run> runs(const Strip& strip) const { return std::span(runs_).subspan(strip.first_run, strip.runs); }
  // What to keep of a run's columns, where that is not everything.
  std::size_t parts(const Run& run) const { return run.parts; }
  RowBits part(const Run& run, std::size_t i) const;

 private:
  // Keys of a strip, or of one tile of it; with bits, unless all count.
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
