#include "penstock/tensor/block_mask.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "tests/tensor/masks.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

using at::indexing::Slice;
using at::indexing::TensorIndex;

class BlockMaskTest : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

at::Tensor ints(std::initializer_list<int> numbers, at::IntArrayRef shape) {
  return at::tensor(at::ArrayRef<int>(numbers), at::kInt).view(shape);
}

TEST_F(BlockMaskTest, TellsFullBlocksFromPartialOnes) {
  const BlockMask mask = create_block_mask(causal, std::nullopt, std::nullopt, 6, 6, 2);
  EXPECT_TRUE(same_tensor(ints({1, 1, 1}, {1, 1, 3}), mask.kv_num_blocks()));
  EXPECT_TRUE(same_tensor(ints({0, 1, 2, 1, 0, 2, 2, 0, 1}, {1, 1, 3, 3}), mask.kv_indices()));
  EXPECT_TRUE(same_tensor(ints({0, 1, 2}, {1, 1, 3}), mask.full_kv()->num_blocks));
  EXPECT_TRUE(same_tensor(ints({2, 1, 0}, {1, 1, 3}), mask.full_q()->num_blocks));
  EXPECT_TRUE(same_tensor(ints({1, 2, 0, 2, 0, 1, 0, 1, 2}, {1, 1, 3, 3}), mask.full_q()->indices));
}

TEST_F(BlockMaskTest, BecomesTheTableThatItWasMadeFrom) {
  for (const std::int64_t block : {1, 3, 8, 64}) {
    const at::Tensor allowed = patchwork(2, 3, 29, 41, block);
    EXPECT_TRUE(same_tensor(allowed, mask_of(allowed, block).to_mask())) << block;
  }
}

TEST_F(BlockMaskTest, CanHaveABlockLargerThanAllQueriesAndKeys) {
  const BlockMask mask = create_block_mask(causal, std::nullopt, std::nullopt, 5, 7, std::int64_t{1} << 30);
  EXPECT_TRUE(same_tensor(at::ones({5, 7}, at::kBool).tril().view({1, 1, 5, 7}), mask.to_mask()));
}

TEST_F(BlockMaskTest, EvaluatesTheFunctionAFewRowsAtATime) {
  std::int64_t most = 0;
  const MaskMod watching = [&most](const at::Tensor&, const at::Tensor&, const at::Tensor& q, const at::Tensor& kv) {
    most = std::max(most, q.numel() * kv.numel());
    return q >= kv;
  };
  create_block_mask(watching, 4, 4, 4096, 4096, 2048);
  EXPECT_LE(most, std::int64_t{1} << 20);
}

TEST_F(BlockMaskTest, WithoutAFunctionTreatsItsBlocksAsFull) {
  const BlockMask mask = BlockMask::from_kv_blocks(
      {.num_blocks = ints({1, 2}, {2}), .indices = ints({1, 0, 0, 1}, {2, 2})}, std::nullopt, {2, 3});
  EXPECT_EQ(mask.shape(), (std::vector<std::int64_t>{4, 6}));
  EXPECT_FALSE(mask.has_mask_mod());
  EXPECT_EQ(mask.to_mask().sum().item<int>(), 3 * 6);
  EXPECT_TRUE(same_tensor(ints({1, 2}, {2}), mask.q().num_blocks));
  EXPECT_TRUE(same_tensor(ints({0, 1, 1, 1}, {2, 2}), mask.to_dense()));
}

TEST_F(BlockMaskTest, AllowsWhatAllOrAnyOfSeveralFunctionsAllow) {
  const auto table = [](const MaskMod& mod) { return create_mask(mod, 1, 1, 50, 50); };
  const MaskMod near = [](const at::Tensor&, const at::Tensor&, const at::Tensor& q, const at::Tensor& kv) {
    return (q - kv).abs() < 9;
  };
  EXPECT_TRUE(same_tensor(table(causal).logical_and(table(near)), table(and_masks({causal, near}))));
  EXPECT_TRUE(same_tensor(table(causal).logical_or(table(near)), table(or_masks({causal, near, near}))));
  EXPECT_TRUE(same_tensor(at::ones({1, 1, 50, 50}, at::kBool), table(and_masks({}))));
  EXPECT_TRUE(same_tensor(at::zeros({1, 1, 50, 50}, at::kBool), table(or_masks({}))));
  EXPECT_TRUE(same_tensor(table(noop_mask), table(and_masks({noop_mask}))));
}

TEST_F(BlockMaskTest, IsPrintedAsADrawing) {
  std::ostringstream out;
  out << create_block_mask(causal, std::nullopt, std::nullopt, 6, 6, 2);
  EXPECT_EQ(out.str(),
            "BlockMask(shape=(1, 1, 6, 6), sparsity=33.33%, \n"
            "(0, 0)\n"
            "██    \n"
            "████  \n"
            "██████\n"
            ")");
}

TEST_F(BlockMaskTest, DrawsSeveralBlocksInACellAndCountsTheOmittedDrawings) {
  EXPECT_EQ(create_block_mask(causal, 2, 3, 8, 8, 2).to_string(/*grid=*/2, /*limit=*/1),
            "(0, 0)\n░░  \n██░░\n\nand 5 more, which a larger limit shows\n");
}

TEST_F(BlockMaskTest, IsALeafOfAValueAndIsRecognised) {
  const BlockMask mask = create_block_mask(causal, std::nullopt, std::nullopt, 6, 6, 2);
  const c10::IValue value = mask.to_ivalue();
  EXPECT_TRUE(BlockMask::is(value));
  EXPECT_TRUE(BlockMask::from_ivalue(value).kv_indices().is_same(mask.kv_indices()));
  const std::array others = {c10::IValue(), c10::IValue(1), c10::IValue(at::ones({2})), c10::IValue("mask"),
                             c10::IValue(c10::List<std::int64_t>())};
  for (const c10::IValue& other : others) EXPECT_FALSE(BlockMask::is(other)) << other.tagKind();
  EXPECT_EQ(message_of<BlockMaskError>([] { BlockMask::from_ivalue(c10::IValue(1)); }),
            "a value that should be a block mask is int 1.");
}

TEST_F(BlockMaskTest, MovesToADevice) {
  const BlockMask mask = create_block_mask(causal, std::nullopt, std::nullopt, 6, 6, 2).to(at::kMeta);
  EXPECT_TRUE(mask.kv_indices().is_meta());
  EXPECT_TRUE(mask.full_q()->num_blocks.is_meta());
}

TEST_F(BlockMaskTest, SharesWhatIsIndexedWithTheWhole) {
  const at::Tensor allowed = patchwork(4, 3, 37, 21, 8);
  const BlockMask mask = mask_of(allowed, 8);
  const auto part = [&mask](const std::vector<TensorIndex>& indices) { return mask.index(indices).to_mask(); };
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 1, 1), part({1})));
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 3, 1), part({-1})));
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 1, 2).narrow(1, 2, 1), part({Slice(1, 3), 2})));
  EXPECT_TRUE(same_tensor(allowed.index({Slice(0, 4, 2)}), part({Slice(0, 4, 2)})));
  EXPECT_TRUE(same_tensor(allowed.index({at::tensor({3, 0, 3})}), part({at::tensor({3, 0, 3})})));
  EXPECT_TRUE(same_tensor(allowed.narrow(2, 8, 16), part({Slice(), Slice(), Slice(1, 3)})));
  EXPECT_TRUE(same_tensor(allowed.narrow(2, 24, 13), part({Slice(), Slice(), Slice(3)})));
}

TEST_F(BlockMaskTest, RefusesIndicesThatItDoesNotHave) {
  const BlockMask mask = mask_of(patchwork(4, 3, 37, 21, 8), 8);
  EXPECT_EQ(message_of<BlockMaskError>([&] { mask.index({4}); }),
            "BlockMask::index: batch 4 is not among the mask's 4.");
  EXPECT_EQ(message_of<BlockMaskError>([&] { mask.index({0, -4}); }),
            "BlockMask::index: head -4 is not among the mask's 3.");
  EXPECT_EQ(
      message_of<BlockMaskError>([&] { mask.index({0, 0, 0, 0}); }),
      "BlockMask::index: 4 indices into kv_indices of shape [4, 3, 5, 3]; there should be up to 3, of batch, head "
      "and row of query blocks, and 4 dimensions.");
  EXPECT_EQ(message_of<BlockMaskError>([&] { mask.index({TensorIndex(at::indexing::Ellipsis)}); }),
            "BlockMask::index: the index of batch should be an integer, a slice or a one-dimensional tensor.");
  EXPECT_EQ(
      message_of<BlockMaskError>([&] { mask.index({0, 0, at::tensor({4, 0})}); }),
      "BlockMask::index: row of query blocks 4 has 5 queries and not 8; it should be the last of the selected rows.");
}

TEST_F(BlockMaskTest, RefusesListsOfBlocksThatDoNotFit) {
  const at::Tensor counts = ints({1, 1}, {2});
  const at::Tensor indices = ints({0, 1, 0, 1}, {2, 2});
  const auto make = [](const at::Tensor& num_blocks, const at::Tensor& which) {
    return [=] { BlockMask::from_kv_blocks({.num_blocks = num_blocks, .indices = which}); };
  };
  EXPECT_EQ(message_of<BlockMaskError>(make({}, indices)),
            "BlockMask: kv_num_blocks and kv_indices should both be tensors, and one is undefined.");
  EXPECT_EQ(message_of<BlockMaskError>(make(counts.to(at::kFloat), indices)),
            "BlockMask: kv_num_blocks and kv_indices should be of integers.");
  EXPECT_EQ(
      message_of<BlockMaskError>(make(counts[0], counts)),
      "BlockMask: kv_indices has shape [2]; it should be [batch, heads, rows, columns], where the leading two may "
      "be left out.");
  EXPECT_EQ(message_of<BlockMaskError>(make(counts.view({1, 2}), indices)),
            "BlockMask: kv_num_blocks has shape [1, 2] and kv_indices [2, 2]; the first should be the second without "
            "its last dimension.");
  EXPECT_EQ(message_of<BlockMaskError>(make(counts * 3, indices)),
            "BlockMask: kv_num_blocks has a number outside 0…2, the columns of kv_indices.");
  EXPECT_EQ(message_of<BlockMaskError>(make(counts * 2, indices * 5)),
            "BlockMask: kv_indices names block 5; the blocks are 0…1.");
  // Entries after a row's number of blocks are ignored.
  EXPECT_NO_THROW(make(counts, indices * 5)());
}

TEST_F(BlockMaskTest, RefusesFullBlocksSizesAndLengthsThatDoNotFit) {
  const BlockList kv = {.num_blocks = ints({1, 1}, {2}), .indices = ints({0, 1, 0, 1}, {2, 2})};
  const BlockList wide = {.num_blocks = ints({1, 1}, {2}), .indices = ints({0, 1, 2, 0, 1, 2}, {2, 3})};
  EXPECT_EQ(message_of<BlockMaskError>([&] { BlockMask::from_kv_blocks(kv, wide); }),
            "BlockMask: full_kv_indices has shape [2, 3] and kv_indices [2, 2]; they should be the same.");
  EXPECT_EQ(message_of<BlockMaskError>(
                [&] { BlockMask::from_kv_blocks(kv, BlockList{.num_blocks = kv.num_blocks, .indices = {}}); }),
            "BlockMask: full_kv_num_blocks and full_kv_indices should both be tensors, and one is undefined.");
  EXPECT_EQ(message_of<BlockMaskError>([&] { BlockMask::from_kv_blocks(kv, std::nullopt, {0, 4}); }),
            "BlockMask: a block of 0 × 4 is empty; both sizes should be at least 1.");
  EXPECT_EQ(message_of<BlockMaskError>(
                [&] { BlockMask::from_kv_blocks(kv, std::nullopt, 4, nullptr, SeqLengths{.q = 9, .kv = 8}); }),
            "BlockMask: 9 queries and 8 keys in blocks of 4 × 4 make 3 × 2 blocks, but kv_indices has 2 × 2.");
}

TEST_F(BlockMaskTest, RefusesSizesBelowOneAndFunctionsThatReturnNoMask) {
  EXPECT_EQ(message_of<BlockMaskError>([] { create_block_mask(nullptr, 1, 1, 4, 4); }),
            "create_block_mask: mask_mod is empty; it should be callable.");
  EXPECT_EQ(message_of<BlockMaskError>([] { create_block_mask(causal, 0, 1, 4, 4); }),
            "create_block_mask: batch is 0; it should be at least 1.");
  EXPECT_EQ(message_of<BlockMaskError>([] { create_block_mask(causal, 1, 1, 4, 4, {4, -1}); }),
            "create_block_mask: block_size.kv is -1; it should be at least 1.");
  EXPECT_EQ(message_of<BlockMaskError>([] { and_masks({causal, nullptr}); }),
            "and_masks: mask function 1 of 2 is empty; each should be callable.");
  EXPECT_EQ(message_of<BlockMaskError>([] { or_masks({nullptr}); }),
            "or_masks: mask function 0 of 1 is empty; each should be callable.");
  const auto made_with = [](const at::Tensor& answer) {
    return message_of<BlockMaskError>([&] {
      create_mask([&](const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) { return answer; }, 1,
                  2, 3, 4);
    });
  };
  const std::string rest =
      " for indices of shape [1, 2, 3, 4]; it should return a bool tensor that broadcasts to that shape.";
  EXPECT_EQ(made_with({}), "mask_mod returned an undefined tensor" + rest);
  EXPECT_EQ(made_with(at::ones({3, 4})), "mask_mod returned a tensor of Float" + rest);
  EXPECT_EQ(made_with(at::ones({4, 3}, at::kBool)), "mask_mod returned a tensor of shape [4, 3]" + rest);
  EXPECT_EQ(made_with(at::ones({1, 1, 1, 1, 1}, at::kBool)),
            "mask_mod returned a tensor of shape [1, 1, 1, 1, 1]" + rest);
}

TEST_F(BlockMaskTest, SplitsAndMergesForEveryBatchAndNumberOfChunks) {
  for (std::int64_t batch = 2; batch <= 7; ++batch) {
    const at::Tensor allowed = patchwork(batch, 2, 20, 20, 8);
    const BlockMask whole = mask_of(allowed, 8);
    for (std::int64_t chunks = 1; chunks <= batch; ++chunks) {
      const std::vector<BlockMask> split = whole.split(chunks);
      const std::vector<at::Tensor> expected = at::tensor_split(allowed, chunks);
      ASSERT_EQ(split.size(), expected.size());
      for (std::size_t i = 0; i < split.size(); ++i) ASSERT_TRUE(same_tensor(expected[i], split[i].to_mask()));
      const BlockMask merged = BlockMask::merge(split);
      ASSERT_TRUE(same_tensor(allowed, merged.to_mask()));
      ASSERT_TRUE(same_tensor(whole.kv_indices(), merged.kv_indices()));
      ASSERT_TRUE(same_tensor(whole.full_q()->indices, merged.full_q()->indices));
    }
  }
}

TEST_F(BlockMaskTest, CallsTheFunctionOfAChunkWithTheRowsOfTheWholeBatch) {
  const at::Tensor ids = at::randint(0, 3, {10, 32});
  const BlockMask whole = create_block_mask(documents(ids), 10, std::nullopt, 32, 32, 8);
  std::int64_t first = 0;
  for (const BlockMask& chunk : whole.split(4)) {
    const at::Tensor own = create_mask(documents(ids.narrow(0, first, chunk.batch())), chunk.batch(), 1, 32, 32);
    EXPECT_TRUE(same_tensor(own, chunk.to_mask()));
    EXPECT_TRUE(same_tensor(own, create_mask(chunk.mask_mod(), chunk.batch(), 1, 32, 32)));
    first += chunk.batch();
  }
  EXPECT_EQ(first, 10);
}

TEST_F(BlockMaskTest, SplitsBySizesAndSplitsChunksAgain) {
  const at::Tensor allowed = patchwork(9, 1, 16, 16, 4);
  const BlockMask whole = mask_of(allowed, 4);
  const std::vector<BlockMask> sizes = whole.split(at::IntArrayRef{2, 6, 1});
  const std::vector<BlockMask> again = sizes[1].split(at::IntArrayRef{1, 5});
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 2, 1), again[0].to_mask()));
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 3, 5), again[1].to_mask()));
  const std::array pieces = {sizes[0], again[0], again[1], sizes[2]};
  EXPECT_TRUE(same_tensor(allowed, BlockMask::merge(pieces).to_mask()));
  // Merge some chunks, without the first row, and split the result again.
  const BlockMask some = BlockMask::merge(std::array{again[0], again[1], sizes[2]});
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 2, 7), some.to_mask()));
  EXPECT_TRUE(same_tensor(allowed.narrow(0, 6, 3), some.split(2)[1].to_mask()));
}

TEST_F(BlockMaskTest, SharesAMaskOfBatchOneAmongAllChunks) {
  const BlockMask whole = create_block_mask(causal, std::nullopt, 2, 32, 32, 8);
  const std::vector<BlockMask> chunks = whole.split(5);
  ASSERT_EQ(chunks.size(), 5U);
  for (const BlockMask& chunk : chunks) EXPECT_TRUE(chunk.kv_indices().is_same(whole.kv_indices()));
  const BlockMask merged = BlockMask::merge(chunks);
  EXPECT_EQ(merged.batch(), 1);
  EXPECT_TRUE(merged.kv_indices().is_same(whole.kv_indices()));
}

TEST_F(BlockMaskTest, MergesMasksThatWereNotSplitFromOne) {
  const at::Tensor one = patchwork(2, 2, 20, 20, 8);
  const at::Tensor other = patchwork(1, 2, 20, 20, 8);
  const at::Tensor third = patchwork(3, 2, 20, 20, 8);
  const BlockMask merged = BlockMask::merge(std::array{mask_of(one, 8), mask_of(other, 8), mask_of(third, 8)});
  EXPECT_TRUE(same_tensor(at::cat({one, other, third}), merged.to_mask()));
  // Chunks in another order are not the mask that they were split from.
  const BlockMask whole = mask_of(third, 8);
  const std::vector<BlockMask> split = whole.split(3);
  EXPECT_TRUE(same_tensor(third.flip(0), BlockMask::merge(std::array{split[2], split[1], split[0]}).to_mask()));
}

TEST_F(BlockMaskTest, RefusesToSplitIntoSizesThatDoNotAddUp) {
  const BlockMask whole = mask_of(patchwork(3, 1, 8, 8, 4), 4);
  EXPECT_EQ(message_of<BlockMaskError>([&] { whole.split(std::int64_t{0}); }),
            "BlockMask::split: into 0 chunks; there should be at least 1.");
  EXPECT_EQ(message_of<BlockMaskError>([&] { whole.split(4); }),
            "BlockMask::split: a batch of 3 is too small for 4 chunks.");
  EXPECT_EQ(message_of<BlockMaskError>([&] { whole.split(at::IntArrayRef{1, 1}); }),
            "BlockMask::split: chunks of [1, 1] rows; they should add up to the batch of 3, and each be at least 1.");
  EXPECT_EQ(message_of<BlockMaskError>([&] { whole.split(at::IntArrayRef{3, 0}); }),
            "BlockMask::split: chunks of [3, 0] rows; they should add up to the batch of 3, and each be at least 1.");
}

TEST_F(BlockMaskTest, RefusesToMergeMasksOfDifferentForm) {
  EXPECT_EQ(message_of<BlockMaskError>([] { BlockMask::merge({}); }),
            "BlockMask::merge: there are no chunks; there should be at least 1.");
  const auto two = [](const BlockMask& one, const BlockMask& other) {
    return message_of<BlockMaskError>([&] { BlockMask::merge(std::array{one, other}); });
  };
  const BlockMask first = create_block_mask(causal, 2, 2, 8, 8, 4);
  EXPECT_EQ(
      two(first, create_block_mask(causal, 2, 1, 8, 7, {4, 2})),
      "BlockMask::merge: chunk 1 has 1 heads, 8 queries and 7 keys in blocks of 4 × 2 with full blocks on cpu, and "
      "chunk 0 has 2 heads, 8 queries and 8 keys in blocks of 4 × 4 with full blocks on cpu; they should have the "
      "same.");
  const BlockMask without_full = BlockMask::from_kv_blocks(
      {.num_blocks = first.kv_num_blocks(), .indices = first.kv_indices()}, std::nullopt, 4, causal);
  EXPECT_NE(two(first, without_full).find("without full blocks"), std::string::npos);
}

// Compares with the results of PyTorch, which attention_reference.py has written.

BlockMask ours(const Case& reference) {
  std::vector<std::int64_t> sizes;
  for (const c10::IValue& size : items(reference.at("sizes"))) sizes.push_back(size.toInt());
  const std::string rule = reference.at("rule").toStringRef();
  const at::Tensor argument = reference.at("argument").toTensor();
  const MaskMod mod = rule == "causal"   ? MaskMod(causal)
                      : rule == "window" ? window(argument.item<std::int64_t>())
                                         : looked_up(argument);
  return create_block_mask(mod, sizes[0], sizes[1], sizes[2], sizes[3], {sizes[4], sizes[5]});
}

void expect_fields(const Case& reference, const BlockMask& mask) {
  const auto fields = reference.at("fields").toGenericDict();
  const std::pair<const char*, at::Tensor> named[] = {{"kv_num_blocks", mask.kv_num_blocks()},
                                                      {"kv_indices", mask.kv_indices()},
                                                      {"full_kv_num_blocks", mask.full_kv()->num_blocks},
                                                      {"full_kv_indices", mask.full_kv()->indices},
                                                      {"q_num_blocks", mask.q().num_blocks},
                                                      {"q_indices", mask.q().indices},
                                                      {"full_q_num_blocks", mask.full_q()->num_blocks},
                                                      {"full_q_indices", mask.full_q()->indices}};
  for (const auto& [name, tensor] : named) EXPECT_TRUE(same_tensor(fields.at(name).toTensor(), tensor)) << name;
}

TEST(BlockMaskReference, MakesTheSameMasks) {
  std::size_t count = 0;
  for (const Case& reference : reference_cases("masks.pt")) {
    SCOPED_TRACE("case " + std::to_string(count++));
    const BlockMask mask = ours(reference);
    expect_fields(reference, mask);
    EXPECT_TRUE(same_tensor(reference.at("dense").toTensor(), mask.to_dense()));
    EXPECT_NEAR(mask.sparsity(), reference.at("sparsity").toDouble(), 1e-9);
    const std::string text = reference.at("text").toStringRef();
    std::ostringstream own;
    own << mask;
    if (!text.empty()) {
      EXPECT_EQ(own.str(), text);
    }
    if (HasFailure()) break;
  }
  EXPECT_GE(count, 300U);
}

TensorIndex read_index(const c10::IValue& words) {
  const std::vector<c10::IValue> list = items(words);
  const std::string kind = list[0].toStringRef();
  const auto number = [&list](std::size_t i) { return std::int64_t{std::stoll(list[i].toStringRef())}; };
  if (kind == "integer") return c10::SymInt(number(1));
  if (kind == "slice") return Slice(number(1), number(2), number(3));
  return at::full({1}, number(1), at::kLong);
}

TEST(BlockMaskReference, HasTheSamePartsAtAnIndex) {
  std::size_t count = 0;
  for (const Case& reference : reference_cases("masks.pt")) {
    const BlockMask mask = ours(reference);
    for (const c10::IValue& part : items(reference.at("parts"))) {
      SCOPED_TRACE("part " + std::to_string(count++));
      std::vector<TensorIndex> indices;
      for (const c10::IValue& words : items(part.toGenericDict().at("index"))) indices.push_back(read_index(words));
      expect_fields(part.toGenericDict(), mask.index(indices));
    }
    if (HasFailure()) break;
  }
  EXPECT_GE(count, 400U);
}

TEST(BlockMaskReference, SplitsIntoTheSameChunks) {
  std::size_t count = 0;
  for (const Case& reference : reference_cases("masks.pt")) {
    const std::vector<c10::IValue> expected = items(reference.at("chunks"));
    if (expected.empty()) continue;
    SCOPED_TRACE("case " + std::to_string(count++));
    const BlockMask mask = ours(reference);
    const std::vector<BlockMask> chunks = mask.split(static_cast<std::int64_t>(expected.size()));
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const Case chunk = expected[i].toGenericDict();
      expect_fields(chunk, chunks[i]);
      const at::Tensor table = create_mask(chunks[i].mask_mod(), chunks[i].batch(), chunks[i].heads(),
                                           chunks[i].seq_lengths().q, chunks[i].seq_lengths().kv);
      EXPECT_TRUE(same_tensor(chunk.at("allowed").toTensor(), table));
    }
    EXPECT_TRUE(same_tensor(mask.to_mask(), BlockMask::merge(chunks).to_mask()));
    if (HasFailure()) break;
  }
  EXPECT_GE(count, 200U);
}

}  // namespace
}  // namespace penstock::internal::testing
