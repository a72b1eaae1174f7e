// Tests microbatches with block masks: chunks must allow the same pairs as the whole.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "penstock/tensor/attention.h"
#include "penstock/tensor/block_mask.h"
#include "penstock/tensor/microbatch.h"
#include "tests/tensor/chunks.h"
#include "tests/tensor/masks.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

constexpr std::int64_t kLength = 32;

at::Tensor random_query(std::int64_t batch) {
  return at::rand({batch, 2, kLength, 8}, at::kDouble);
}

at::Tensor attend(const at::Tensor& x, const c10::IValue& mask) {
  return mask.isNone() ? flex_attention(x, x, x) : flex_attention(x, x, x, {}, BlockMask::from_ivalue(mask));
}

// Expects that merged attention of chunks equals attention of the whole, and that merged chunks of a mask equal the
// mask.
void expect_chunks_attend_as_the_whole(const at::Tensor& x, const c10::IValue& mask, std::int64_t chunks) {
  const SplitArgs split = split_args_kwargs_into_chunks({x}, kwargs_of(dict({{"mask", mask}})), chunks);
  ASSERT_EQ(split.args.size(), static_cast<std::size_t>(chunks));
  std::vector<c10::IValue> outputs;
  for (std::size_t i = 0; i < split.args.size(); ++i) {
    outputs.emplace_back(attend(split.args[i][0].toTensor(), split.kwargs[i].at("mask")));
  }
  EXPECT_TRUE(at::allclose(merge_chunks(outputs).toTensor(), attend(x, mask), 1e-12, 1e-12));
  if (mask.isNone()) return;
  const c10::IValue merged = merge_chunks(values_of(split.kwargs)).toGenericDict().at("mask");
  EXPECT_TRUE(same_tensor(BlockMask::from_ivalue(mask).to_mask(), BlockMask::from_ivalue(merged).to_mask()));
}

// The cases of PyTorch's tests: a causal mask shared by all rows, a document mask for each row, no mask, and a batch of
// one.

TEST(MicrobatchMask, OfAllRowsIsSharedByAllChunks) {
  const BlockMask mask = create_block_mask(causal, std::nullopt, std::nullopt, kLength, kLength, 8);
  for (const std::int64_t batch : {4, 6, 7}) {
    expect_chunks_attend_as_the_whole(random_query(batch), mask.to_ivalue(), 4);
  }
}

TEST(MicrobatchMask, OfDocumentsInEachRowIsSplitWithTheRows) {
  for (const std::int64_t batch : {4, 6, 7, 11}) {
    const at::Tensor ids = std::get<0>(at::randint(0, 4, {batch, kLength}).sort());
    const BlockMask mask = create_block_mask(documents(ids), batch, std::nullopt, kLength, kLength, 8);
    for (const std::int64_t chunks : {1, 2, 3, 4}) {
      expect_chunks_attend_as_the_whole(random_query(batch), mask.to_ivalue(), chunks);
    }
  }
}

TEST(MicrobatchMask, MayBeLeftOut) {
  expect_chunks_attend_as_the_whole(random_query(5), {}, 3);
}

TEST(MicrobatchMask, OfABatchOfOneIsSharedByAllChunks) {
  const at::Tensor ids = at::randint(0, 2, {1, kLength});
  const BlockMask mask = create_block_mask(documents(ids), 1, std::nullopt, kLength, kLength, 8);
  const SplitArgs split =
      split_args_kwargs_into_chunks({mask.to_ivalue()}, kwargs_of(dict({{"x", random_query(3)}})), 3);
  ASSERT_EQ(split.args.size(), 3U);
  for (const Args& args : split.args) {
    EXPECT_TRUE(same_tensor(mask.to_mask(), BlockMask::from_ivalue(args[0]).to_mask()));
  }
  expect_chunks_attend_as_the_whole(random_query(1), mask.to_ivalue(), 1);
}

// Cases beyond PyTorch's tests

TEST(MicrobatchMask, LimitsTheNumberOfChunksAsATensorDoes) {
  const c10::IValue mask = create_block_mask(causal, 3, std::nullopt, kLength, kLength, 8).to_ivalue();
  EXPECT_EQ(split_args_kwargs_into_chunks({random_query(9), mask}, {}, 5).args.size(), 3U);
}

TEST(MicrobatchMask, IsReplicatedWhereItsSpecSaysSo) {
  const c10::IValue mask = create_block_mask(causal, 3, std::nullopt, kLength, kLength, 8).to_ivalue();
  const SplitArgs split = split_args_kwargs_into_chunks({mask}, {}, 5, tuple({replicate()}));
  ASSERT_EQ(split.args.size(), 5U);
  EXPECT_EQ(BlockMask::from_ivalue(split.args[4][0]).batch(), 3);
  const c10::IValue merged = merge_chunks(values_of(split.args), tuple({replicate()}));
  EXPECT_EQ(BlockMask::from_ivalue(merged.toTupleRef().elements()[0]).batch(), 3);
}

TEST(MicrobatchMask, RoundTripsWithinNestedValues) {
  const BlockMask mask = create_block_mask(documents(at::randint(0, 3, {7, kLength})), 7, 2, kLength, kLength, 8);
  const c10::IValue value = dict({{"layers", list({tuple({counting({7, 2}), mask.to_ivalue()}), 0.5})}});
  const c10::IValue spec = dict({{"layers", list({tuple({rows(), rows()}), replicate()})}});
  const SplitArgs split = split_args_kwargs_into_chunks({value}, {}, 3, tuple({spec}));
  const c10::IValue merged = merge_chunks(values_of(split.args), tuple({spec}));
  const std::vector<c10::IValue> leaves = flatten_args(merged);
  ASSERT_EQ(leaves.size(), 3U);
  EXPECT_TRUE(same(counting({7, 2}), leaves[0]));
  EXPECT_TRUE(same_tensor(mask.to_mask(), BlockMask::from_ivalue(leaves[1]).to_mask()));
  EXPECT_TRUE(same(0.5, leaves[2]));
}

TEST(MicrobatchMask, IsSplitAlongTheBatchOnly) {
  const c10::IValue mask = create_block_mask(causal, 4, std::nullopt, kLength, kLength, 8).to_ivalue();
  expect_error<ChunkError>(
      [&] {
        split_args_kwargs_into_chunks({}, kwargs_of(dict({{"mask", mask}})), 2, std::nullopt,
                                      dict({{"mask", columns()}}));
      },
      "kwargs['mask']: a block mask is split along dimension 0, its batch, not along 1.");
  expect_error<ChunkError>([&] { merge_chunks({mask, mask}, columns()); },
                           "chunks[0]: a block mask is split along dimension 0, its batch, not along 1.");
}

TEST(MicrobatchMask, ThatCannotBeMergedSaysWhere) {
  const c10::IValue one = create_block_mask(causal, 2, std::nullopt, kLength, kLength, 8).to_ivalue();
  const c10::IValue shorter = create_block_mask(causal, 2, std::nullopt, kLength / 2, kLength, 8).to_ivalue();
  expect_error<ChunkError>([&] { merge_chunks({tuple({one}), tuple({counting({2})})}); },
                           "chunks[1][0]: found float32 tensor of shape [2], expected a block mask to join.");
  expect_error<ChunkError>([&] { merge_chunks({tuple({counting({2})}), tuple({one})}); },
                           "chunks[1][0]: found block mask of shape [2, 1, 32, 32], expected a tensor to join.");
  expect_error<ChunkError>([&] { merge_chunks({tuple({one}), tuple({shorter})}); },
                           "chunks[1][0]: found a block mask of 1 heads, 16 queries and 32 keys in blocks of 8 × 8 "
                           "with full blocks on cpu, which cannot follow chunks[0][0], of 1 heads, 32 queries and 32 "
                           "keys in blocks of 8 × 8 with full blocks on cpu.");
}

}  // namespace
}  // namespace penstock::internal::testing
