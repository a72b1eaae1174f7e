#include "penstock/tensor/block_mask.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstddef>
#include <iomanip>
#include <mutex>
#include <ostream>
#include <sstream>
#include <string_view>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/tensor/attention/plan.h"

namespace penstock {

using internal::AttentionPlan;
using internal::concat;
using internal::join;
using internal::shape_text;

namespace {

// Registers the class, so that an IValue can hold a mask.
const auto kRegistered = torch::class_<BlockMask>("penstock", "BlockMask");

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

// Returns a dense tensor with 1 for each block of the list. Unused entries are scattered to an extra column, which is
// removed.
at::Tensor dense_from_list(const BlockList& list) {
  const std::int64_t columns = list.indices.size(-1);
  const at::Tensor position = at::arange(columns, list.indices.options());
  const at::Tensor column = at::where(position < list.num_blocks.unsqueeze(-1), list.indices, columns);
  std::vector<std::int64_t> sizes = list.indices.sizes().vec();
  sizes.back() = columns + 1;
  return at::zeros(sizes, list.indices.options().dtype(at::kInt))
      .scatter_(-1, column.to(at::kLong), 1)
      .narrow(-1, 0, columns);
}

// Returns the list of a dense tensor, with the indices of ones first, in ascending order.
BlockList list_from_dense(const at::Tensor& dense) {
  return {dense.sum(-1).to(at::kInt), at::argsort(dense, /*stable=*/true, -1, /*descending=*/true).to(at::kInt)};
}

BlockList transposed(const BlockList& list) {
  return list_from_dense(dense_from_list(list).transpose(-2, -1).contiguous());
}

void check_list(const BlockList& list, const std::string& name) {
  const auto fail = [&name](const auto&... problem) { throw BlockMaskError(concat("BlockMask: ", name, problem...)); };
  if (!list.num_blocks.defined() || !list.indices.defined()) {
    fail("num_blocks and ", name, "indices should both be tensors, and one is undefined.");
  }
  if (!at::isIntegralType(list.num_blocks.scalar_type(), false) ||
      !at::isIntegralType(list.indices.scalar_type(), false)) {
    fail("num_blocks and ", name, "indices should be of integers.");
  }
  if (list.indices.dim() < 2 || list.indices.dim() > 4) {
    fail("indices has shape ", shape_text(list.indices.sizes()),
         "; it should be [batch, heads, rows, columns], where the leading two may be left out.");
  }
  if (list.num_blocks.sizes() != list.indices.sizes().slice(0, static_cast<std::size_t>(list.indices.dim()) - 1)) {
    fail("num_blocks has shape ", shape_text(list.num_blocks.sizes()), " and ", name, "indices ",
         shape_text(list.indices.sizes()), "; the first should be the second without its last dimension.");
  }
  const std::int64_t columns = list.indices.size(-1);
  if ((list.num_blocks < 0).logical_or(list.num_blocks > columns).any().item<bool>()) {
    fail("num_blocks has a number outside 0…", columns, ", the columns of ", name, "indices.");
  }
  const at::Tensor used = at::arange(columns, list.indices.options()) < list.num_blocks.unsqueeze(-1);
  const at::Tensor outside = (list.indices < 0).logical_or(list.indices >= columns).logical_and(used);
  if (outside.any().item<bool>()) {
    fail("indices names block ", list.indices.masked_select(outside)[0].item<std::int64_t>(), "; the blocks are 0…",
         columns - 1, ".");
  }
}

void check_sizes(const BlockList& kv, const BlockSize& block, const SeqLengths& lengths) {
  if (block.q < 1 || block.kv < 1) {
    throw BlockMaskError(
        concat("BlockMask: a block of ", block.q, " × ", block.kv, " is empty; both sizes should be at least 1."));
  }
  const std::int64_t rows = kv.indices.size(-2);
  const std::int64_t columns = kv.indices.size(-1);
  if (ceil_div(lengths.q, block.q) != rows || ceil_div(lengths.kv, block.kv) != columns) {
    throw BlockMaskError(concat("BlockMask: ", lengths.q, " queries and ", lengths.kv, " keys in blocks of ", block.q,
                                " × ", block.kv, " make ", ceil_div(lengths.q, block.q), " × ",
                                ceil_div(lengths.kv, block.kv), " blocks, but kv_indices has ", rows, " × ", columns,
                                "."));
  }
}

// Returns the sums over blocks of the last dimension; the last block may be shorter.
at::Tensor sum_blocks(const at::Tensor& values, std::int64_t block) {
  const std::int64_t blocks = values.size(-1) / block;
  const std::int64_t rest = values.size(-1) % block;
  std::vector<at::Tensor> sums;
  if (blocks > 0) sums.push_back(values.narrow(-1, 0, blocks * block).unflatten(-1, {blocks, block}).sum(-1));
  if (rest > 0) sums.push_back(values.narrow(-1, blocks * block, rest).sum(-1, /*keepdim=*/true));
  return at::cat(sums, -1);
}

// Returns the number of pairs that mask_mod allows in each block of a row of blocks. Evaluates a few rows at a time.
at::Tensor count_allowed(const MaskMod& mask_mod, const at::Tensor& b, const at::Tensor& h, const at::Tensor& q,
                         const at::Tensor& kv, std::int64_t kv_block) {
  constexpr std::int64_t kPairsAtOnce = 1 << 20;
  const at::Tensor first = evaluate_mask_mod(mask_mod, b, h, q.narrow(0, 0, 1), kv.narrow(0, 0, 1));
  const std::int64_t pairs_a_row = first.size(0) * first.size(1) * kv.numel();
  const std::int64_t rows_at_once = std::max<std::int64_t>(1, kPairsAtOnce / pairs_a_row);
  at::Tensor count;
  for (std::int64_t row = 0; row < q.numel(); row += rows_at_once) {
    const std::int64_t rows = std::min(rows_at_once, q.numel() - row);
    const at::Tensor allowed = evaluate_mask_mod(mask_mod, b, h, q.narrow(0, row, rows), kv);
    const at::Tensor in_rows = allowed.expand({allowed.size(0), allowed.size(1), rows, kv.numel()}).sum(2);
    const at::Tensor part = sum_blocks(in_rows, kv_block);
    count = count.defined() ? count + part : part;
  }
  return count;
}

std::string tuple_text(const std::vector<std::int64_t>& numbers) {
  return concat('(', join(numbers), ')');
}

// Draws blocks [rows, columns].
std::string drawing(const at::Tensor& blocks, std::int64_t grid) {
  const std::int64_t rows = blocks.size(0);
  const std::int64_t columns = blocks.size(1);
  const std::int64_t cell_rows = std::max<std::int64_t>(1, ceil_div(rows, grid));
  const std::int64_t cell_columns = std::max<std::int64_t>(1, ceil_div(columns, grid));
  std::string text;
  for (std::int64_t row = 0; row < rows; row += cell_rows) {
    for (std::int64_t column = 0; column < columns; column += cell_columns) {
      const at::Tensor cell = blocks.narrow(0, row, std::min(cell_rows, rows - row))
                                  .narrow(1, column, std::min(cell_columns, columns - column));
      const auto present = cell.sum().item<std::int64_t>();
      text += present == cell.numel() ? "██" : present == 0 ? "  " : "░░";
    }
    text += "\n";
  }
  return text;
}

}  // namespace

struct BlockMask::LazyPlan {
  std::once_flag computed;
  std::unique_ptr<const AttentionPlan> plan;
};

BlockMask::BlockMask(BlockList kv, std::optional<BlockList> full_kv, BlockSize block_size, SeqLengths seq_lengths,
                     std::shared_ptr<const MaskMod> mask_mod, std::int64_t first_row)
    : kv_(std::move(kv)),
      full_kv_(std::move(full_kv)),
      q_(transposed(kv_)),
      block_size_(block_size),
      seq_lengths_(seq_lengths),
      mask_mod_(std::move(mask_mod)),
      first_row_(first_row),
      plan_(std::make_shared<LazyPlan>()) {
  if (full_kv_) full_q_ = transposed(*full_kv_);
}

BlockMask BlockMask::from_kv_blocks(const BlockList& kv, const std::optional<BlockList>& full_kv, BlockSize block_size,
                                    MaskMod mask_mod, std::optional<SeqLengths> seq_lengths) {
  check_list(kv, "kv_");
  if (full_kv) {
    check_list(*full_kv, "full_kv_");
    if (full_kv->indices.sizes() != kv.indices.sizes()) {
      throw BlockMaskError(concat("BlockMask: full_kv_indices has shape ", shape_text(full_kv->indices.sizes()),
                                  " and kv_indices ", shape_text(kv.indices.sizes()), "; they should be the same."));
    }
  }
  if (!seq_lengths) {
    seq_lengths = {.q = kv.indices.size(-2) * block_size.q, .kv = kv.indices.size(-1) * block_size.kv};
  }
  check_sizes(kv, block_size, *seq_lengths);
  auto shared_mod = mask_mod ? std::make_shared<const MaskMod>(std::move(mask_mod)) : nullptr;
  return {kv, full_kv, block_size, *seq_lengths, std::move(shared_mod), 0};
}

std::vector<std::int64_t> BlockMask::shape() const {
  std::vector<std::int64_t> sizes = kv_.indices.sizes().vec();
  sizes[sizes.size() - 2] = seq_lengths_.q;
  sizes[sizes.size() - 1] = seq_lengths_.kv;
  return sizes;
}

std::int64_t BlockMask::batch() const {
  return kv_.indices.dim() == 4 ? kv_.indices.size(0) : 1;
}

std::int64_t BlockMask::heads() const {
  return kv_.indices.dim() >= 3 ? kv_.indices.size(-3) : 1;
}

MaskMod BlockMask::mask_mod() const {
  if (!mask_mod_) return noop_mask;
  if (first_row_ == 0) return *mask_mod_;
  return
      [mod = mask_mod_, first = first_row_](const at::Tensor& b, const at::Tensor& h, const at::Tensor& q_idx,
                                            const at::Tensor& kv_idx) { return (*mod)(b + first, h, q_idx, kv_idx); };
}

at::Tensor BlockMask::to_dense() const {
  const at::Tensor partial = dense_from_list(kv_);
  return full_kv_ ? partial.bitwise_or(dense_from_list(*full_kv_)) : partial.contiguous();
}

at::Tensor BlockMask::to_mask() const {
  const at::TensorOptions options = at::TensorOptions(at::kLong).device(kv_.indices.device());
  const at::Tensor row = at::arange(seq_lengths_.q, options).floor_divide(block_size_.q);
  const at::Tensor column = at::arange(seq_lengths_.kv, options).floor_divide(block_size_.kv);
  const auto each_pair = [&](const BlockList& list) {
    const at::Tensor blocks = dense_from_list(list).to(at::kBool);
    return blocks.reshape({batch(), heads(), blocks.size(-2), blocks.size(-1)})
        .index_select(-2, row)
        .index_select(-1, column);
  };
  at::Tensor mask = each_pair(kv_);
  if (has_mask_mod()) {
    mask = mask.logical_and(
        create_mask(mask_mod(), batch(), heads(), seq_lengths_.q, seq_lengths_.kv, kv_.indices.device()));
  }
  return full_kv_ ? mask.logical_or(each_pair(*full_kv_)) : mask;
}

double BlockMask::sparsity() const {
  auto blocks = kv_.num_blocks.sum().item<std::int64_t>();
  if (full_kv_) blocks += full_kv_->num_blocks.sum().item<std::int64_t>();
  const double covered =
      static_cast<double>(blocks) * static_cast<double>(block_size_.q) * static_cast<double>(block_size_.kv);
  double whole = 1;
  for (const std::int64_t size : shape()) whole *= static_cast<double>(size);
  return whole == 0 ? 0 : 100 * (1 - covered / whole);
}

std::string BlockMask::to_string(std::int64_t grid, std::int64_t limit) const {
  const at::Tensor dense = to_dense().to(at::kCPU);
  const at::Tensor drawings = dense.flatten(0, -3);
  const at::IntArrayRef leading = dense.sizes().slice(0, static_cast<std::size_t>(dense.dim()) - 2);
  const std::int64_t count = dense.dim() == 2 ? 1 : drawings.size(0);
  std::string text;
  for (std::int64_t i = 0; i < std::min(count, limit); ++i) {
    std::vector<std::int64_t> indices(leading.size());
    std::int64_t rest = i;
    for (std::size_t dim = leading.size(); dim-- > 0; rest /= leading[dim]) indices[dim] = rest % leading[dim];
    if (i > 0) text += "\n";
    text += tuple_text(indices) + "\n" + drawing(dense.dim() == 2 ? dense : drawings[i], grid);
  }
  if (count > limit) text += "\nand " + std::to_string(count - limit) + " more, which a larger limit shows\n";
  return text;
}

BlockMask BlockMask::to(at::Device device) const {
  BlockMask moved = *this;
  const auto move_list = [device](BlockList& list) {
    list = {.num_blocks = list.num_blocks.to(device), .indices = list.indices.to(device)};
  };
  move_list(moved.kv_);
  move_list(moved.q_);
  if (moved.full_kv_) move_list(*moved.full_kv_);
  if (moved.full_q_) move_list(*moved.full_q_);
  moved.plan_ = std::make_shared<LazyPlan>();
  return moved;
}

std::string BlockMask::description() const {
  return concat("block mask of shape ", shape_text(shape()));
}

bool BlockMask::is(const c10::IValue& value) {
  return value.isObject() && value.isCustomClass() &&
         *value.type() == *c10::getCustomClassType<c10::intrusive_ptr<BlockMask>>();
}

const BlockMask& BlockMask::from_ivalue(const c10::IValue& value) {
  if (!is(value)) throw BlockMaskError(concat("a value that should be a block mask is ", describe(value), "."));
  return *value.toCustomClass<BlockMask>();
}

c10::IValue BlockMask::to_ivalue() const {
  return c10::make_intrusive<BlockMask>(*this);
}

const AttentionPlan& internal::plan_of(const BlockMask& mask) {
  std::call_once(mask.plan_->computed, [&] { mask.plan_->plan = std::make_unique<const AttentionPlan>(mask); });
  return *mask.plan_->plan;
}

BlockMask create_block_mask(const MaskMod& mask_mod, std::optional<std::int64_t> batch,
                            std::optional<std::int64_t> heads, std::int64_t q_len, std::int64_t kv_len,
                            BlockSize block_size, at::Device device) {
  if (!mask_mod) throw BlockMaskError("create_block_mask: mask_mod is empty; it should be callable.");
  const std::pair<const char*, std::int64_t> at_least_one[] = {
      {"batch", batch.value_or(1)}, {"heads", heads.value_or(1)},   {"q_len", q_len},
      {"kv_len", kv_len},           {"block_size.q", block_size.q}, {"block_size.kv", block_size.kv}};
  for (const auto& [name, size] : at_least_one) {
    if (size < 1) {
      throw BlockMaskError(concat("create_block_mask: ", name, " is ", size, "; it should be at least 1."));
    }
  }
  const auto indices = [device](std::int64_t count) {
    return at::arange(count, at::TensorOptions(at::kLong).device(device));
  };
  const at::Tensor b = indices(batch.value_or(1));
  const at::Tensor h = indices(heads.value_or(1));
  const at::Tensor q = indices(q_len);
  const at::Tensor kv = indices(kv_len);

  std::vector<at::Tensor> rows;
  for (std::int64_t row = 0; row < q_len; row += block_size.q) {
    const at::Tensor block = q.narrow(0, row, std::min(block_size.q, q_len - row));
    rows.push_back(count_allowed(mask_mod, b, h, block, kv, block_size.kv));
  }
  const at::Tensor allowed = at::stack(rows, 2);
  const std::vector<std::int64_t> whole = {b.numel(), h.numel(), allowed.size(2), allowed.size(3)};
  const auto list = [&whole](const at::Tensor& blocks) {
    return list_from_dense(blocks.to(at::kInt).expand(whole).contiguous());
  };
  const at::Tensor full = allowed == block_size.q * block_size.kv;
  return BlockMask::from_kv_blocks(list((allowed > 0).logical_and(full.logical_not())), list(full), block_size,
                                   mask_mod, SeqLengths{.q = q_len, .kv = kv_len});
}

std::ostream& operator<<(std::ostream& out, const BlockMask& mask) {
  constexpr std::string_view kSpace = " \n";
  std::string drawings = mask.to_string();
  drawings.erase(drawings.find_last_not_of(kSpace) + 1);
  std::ostringstream percentage;
  percentage << std::fixed << std::setprecision(2) << mask.sparsity();
  return out << "BlockMask(shape=" << tuple_text(mask.shape()) << ", sparsity=" << percentage.str() << "%, \n"
             << drawings << "\n)";
}

}  // namespace penstock
