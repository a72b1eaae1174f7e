#include "penstock/tensor/attention.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>

#include "penstock/tensor/attention/plan.h"
#include "tests/tensor/masks.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

ScoreMod alibi(const at::Tensor& slopes) {
  return [slopes](const at::Tensor& score, const at::Tensor& /*b*/, const at::Tensor& h, const at::Tensor& q,
                  const at::Tensor& kv) { return score + slopes.index({h}) * (kv - q); };
}

at::Tensor soft_cap(const at::Tensor& score, const at::Tensor& /*b*/, const at::Tensor& /*h*/, const at::Tensor& /*q*/,
                    const at::Tensor& /*kv*/) {
  return 2 * at::tanh(score / 2);
}

at::Tensor slopes_of(std::int64_t heads) {
  return at::pow(2.0, -8.0 * at::arange(1, heads + 1, at::kDouble) / heads);
}

struct Inputs {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;

  std::vector<at::Tensor> all() const { return {query, key, value}; }
};

struct Shape {
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t q_len = 1;
  std::int64_t kv_len = 1;
  std::int64_t size = 8;
  std::int64_t value_size = 8;
};

Inputs inputs_of(const Shape& shape, at::ScalarType type = at::kDouble) {
  const auto leaf = [type](at::IntArrayRef sizes) { return at::randn(sizes, type).requires_grad_(); };
  return {.query = leaf({shape.batch, shape.heads, shape.q_len, shape.size}),
          .key = leaf({shape.batch, shape.kv_heads, shape.kv_len, shape.size}),
          .value = leaf({shape.batch, shape.kv_heads, shape.kv_len, shape.value_size})};
}

// Computes attention with dense scores, by differentiable operators.
at::Tensor dense_attention(const Inputs& inputs, const ScoreMod& score_mod, const at::Tensor& allowed,
                           std::optional<double> scale = std::nullopt) {
  const std::int64_t group = inputs.query.size(1) / inputs.key.size(1);
  const at::Tensor key = inputs.key.repeat_interleave(group, 1);
  const at::Tensor value = inputs.value.repeat_interleave(group, 1);
  at::Tensor scores = inputs.query.matmul(key.transpose(-1, -2)) *
                      scale.value_or(1 / std::sqrt(static_cast<double>(inputs.query.size(3))));
  if (score_mod) {
    const auto index = [](std::int64_t count, at::IntArrayRef sizes) { return at::arange(count).view(sizes); };
    scores = score_mod(scores, index(scores.size(0), {-1, 1, 1, 1}), index(scores.size(1), {1, -1, 1, 1}),
                       index(scores.size(2), {1, 1, -1, 1}), index(scores.size(3), {1, 1, 1, -1}));
  }
  if (allowed.defined()) scores = scores.masked_fill(allowed.logical_not(), -std::numeric_limits<double>::infinity());
  const at::Tensor probabilities = scores.softmax(-1);
  // Rows that attend to nothing are NaN so far.
  const at::Tensor empty = allowed.defined() ? allowed.any(-1, true).logical_not() : at::zeros({}, at::kBool);
  return probabilities.masked_fill(empty, 0).matmul(value);
}

::testing::AssertionResult near(const at::Tensor& expected, const at::Tensor& found, double tolerance) {
  if (!expected.defined() || !found.defined()) return ::testing::AssertionFailure() << "one is undefined";
  if (expected.sizes() != found.sizes()) return ::testing::AssertionFailure() << "the shapes differ";
  if (expected.numel() == 0) return ::testing::AssertionSuccess();
  const auto worst = (expected.to(at::kDouble) - found.to(at::kDouble)).abs().max().item<double>();
  if (worst <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "differs by " << worst << ", where " << tolerance << " is allowed";
}

void expect_agreement(const Inputs& inputs, const ScoreMod& score_mod, const std::optional<BlockMask>& mask,
                      std::optional<double> scale = std::nullopt, const std::vector<at::Tensor>& captured = {},
                      double tolerance = 1e-10) {
  const at::Tensor allowed = mask ? mask->to_mask() : at::Tensor();
  const at::Tensor expected = dense_attention(inputs, score_mod, allowed, scale);
  const bool gqa = inputs.query.size(1) != inputs.key.size(1);
  const at::Tensor found =
      flex_attention(inputs.query, inputs.key, inputs.value, score_mod, mask, scale, gqa, captured);
  ASSERT_TRUE(near(expected, found, tolerance));
  EXPECT_EQ(found.scalar_type(), inputs.query.scalar_type());

  std::vector<at::Tensor> leaves = inputs.all();
  leaves.insert(leaves.end(), captured.begin(), captured.end());
  const at::Tensor seed = at::randn_like(expected);
  const auto expected_gradients = torch::autograd::grad({expected}, leaves, {seed});
  const auto found_gradients = torch::autograd::grad({found}, leaves, {seed});
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_TRUE(near(expected_gradients[i], found_gradients[i], tolerance)) << "gradient " << i;
  }
}

class AttentionTest : public ::testing::Test {
 protected:
  void SetUp() override { at::manual_seed(11); }
};

// Returns a mask by its name, for a batch, heads, lengths and a block size.
std::optional<BlockMask> named_mask(const std::string& name, const Shape& shape, std::int64_t block) {
  if (name == "none") return std::nullopt;
  if (name == "causal") return create_block_mask(causal, std::nullopt, std::nullopt, shape.q_len, shape.kv_len, block);
  if (name == "window") {
    return create_block_mask(window(block + 3), std::nullopt, shape.heads, shape.q_len, shape.kv_len, block);
  }
  if (name == "documents") {
    const std::int64_t longest = std::max(shape.q_len, shape.kv_len);
    const at::Tensor ids =
        at::randint(0, 2, {shape.batch, longest}).mul_(at::rand({shape.batch, longest}) < 0.1).cumsum(1);
    return create_block_mask(documents(ids), shape.batch, std::nullopt, shape.q_len, shape.kv_len, block);
  }
  if (name == "patchwork") return mask_of(patchwork(shape.batch, shape.heads, shape.q_len, shape.kv_len, block), block);
  // Most rows attend to nothing.
  return mask_of(at::rand({shape.batch, 1, shape.q_len, shape.kv_len}) < 0.3 / static_cast<double>(shape.kv_len),
                 block);
}

class EveryMask : public ::testing::TestWithParam<std::tuple<const char*, const char*, int>> {};

TEST_P(EveryMask, AgreesWithDenseAttentionForwardAndBackward) {
  at::manual_seed(13);
  const auto [mask, modification, block] = GetParam();
  const Shape shapes[] = {
      {.batch = 1, .heads = 2, .kv_heads = 2, .q_len = 128, .kv_len = 128, .size = 16, .value_size = 16},
      {.batch = 2, .heads = 4, .kv_heads = 2, .q_len = 75, .kv_len = 75, .size = 8, .value_size = 5},
      {.batch = 2, .heads = 3, .kv_heads = 1, .q_len = 33, .kv_len = 140, .size = 4, .value_size = 8},
      {.batch = 1, .heads = 1, .kv_heads = 1, .q_len = 1, .kv_len = 1, .size = 1, .value_size = 1},
      {.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 70, .kv_len = 1100, .size = 8, .value_size = 8},
  };
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(std::to_string(shape.q_len) + " queries, " + std::to_string(shape.kv_len) + " keys");
    const ScoreMod score_mod = std::string(modification) == "alibi"      ? alibi(slopes_of(shape.heads))
                               : std::string(modification) == "soft_cap" ? ScoreMod(soft_cap)
                                                                         : nullptr;
    expect_agreement(inputs_of(shape), score_mod, named_mask(mask, shape, block));
    if (HasFailure()) break;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Attention, EveryMask,
    ::testing::Combine(::testing::Values("none", "causal", "window", "documents", "patchwork", "sparse"),
                       ::testing::Values("none", "alibi", "soft_cap"), ::testing::Values(16, 37, 128)),
    [](const auto& of) {
      return std::string(std::get<0>(of.param)) + "_" + std::get<1>(of.param) + "_" +
             std::to_string(std::get<2>(of.param));
    });

TEST_F(AttentionTest, ReturnsZerosAndNoGradientsForQueriesThatAttendToNothing) {
  const Inputs inputs = inputs_of({.q_len = 100, .kv_len = 100});
  at::Tensor allowed = at::ones({1, 1, 100, 100}, at::kBool);
  allowed.narrow(2, 10, 50).zero_();
  allowed.narrow(3, 70, 30).zero_();
  const at::Tensor out = flex_attention(inputs.query, inputs.key, inputs.value, nullptr, mask_of(allowed, 16));
  EXPECT_EQ(out.narrow(2, 10, 50).abs().sum().item<double>(), 0);
  out.sum().backward();
  EXPECT_EQ(inputs.query.grad().narrow(2, 10, 50).abs().sum().item<double>(), 0);
  EXPECT_EQ(inputs.key.grad().narrow(2, 70, 30).abs().sum().item<double>(), 0);
  EXPECT_EQ(inputs.value.grad().narrow(2, 70, 30).abs().sum().item<double>(), 0);
  EXPECT_FALSE(at::isnan(inputs.query.grad()).any().item<bool>());
}

TEST_F(AttentionTest, HasTheGradientsThatFiniteDifferencesGive) {
  const Shape shape = {.batch = 1, .heads = 2, .kv_heads = 1, .q_len = 7, .kv_len = 9, .size = 3, .value_size = 2};
  const Inputs inputs = inputs_of(shape);
  const BlockMask mask = mask_of(at::rand({1, 2, 7, 9}) < 0.6, 4);
  const at::Tensor weights = at::randn({1, 2, 7, 2}, at::kDouble);
  const auto result = [&] {
    return (flex_attention(inputs.query, inputs.key, inputs.value, soft_cap, mask, std::nullopt, true) * weights).sum();
  };
  result().backward();
  constexpr double kStep = 1e-6;
  for (const at::Tensor& leaf : inputs.all()) {
    auto* const data = leaf.data_ptr<double>();
    const at::Tensor gradient = leaf.grad().contiguous();
    for (std::int64_t i = 0; i < leaf.numel(); ++i) {
      const at::NoGradGuard no_graph;
      const double there = data[i];
      data[i] = there + kStep;
      const auto above = result().item<double>();
      data[i] = there - kStep;
      const auto below = result().item<double>();
      data[i] = there;
      EXPECT_NEAR(gradient.data_ptr<double>()[i], (above - below) / (2 * kStep), 1e-7);
    }
  }
}

TEST_F(AttentionTest, GivesGradientsToTensorsThatTheScoreModCaptured) {
  const Shape shape = {.batch = 2, .heads = 3, .kv_heads = 3, .q_len = 90, .kv_len = 90};
  const at::Tensor slopes = slopes_of(3).requires_grad_();
  expect_agreement(inputs_of(shape), alibi(slopes), named_mask("causal", shape, 32), std::nullopt, {slopes});
  // Not a leaf: its gradients propagate to the tensor that it was computed from.
  const at::Tensor logs = at::randn({3}, at::kDouble).requires_grad_();
  const auto gradient_of = [&](const auto& attend) {
    const at::Tensor made = logs.exp();
    return torch::autograd::grad({attend(made).sum()}, {logs})[0];
  };
  const Inputs inputs = inputs_of(shape);
  const at::Tensor expected =
      gradient_of([&](const at::Tensor& made) { return dense_attention(inputs, alibi(made), {}).square(); });
  const at::Tensor found = gradient_of([&](const at::Tensor& made) {
    return flex_attention(inputs.query, inputs.key, inputs.value, alibi(made), std::nullopt, std::nullopt, false,
                          {made})
        .square();
  });
  EXPECT_TRUE(near(expected, found, 1e-10));
}

TEST_F(AttentionTest, TakesScoreModsThatIgnoreTheScoreOrMaskByThemselves) {
  const Shape shape = {.heads = 2, .kv_heads = 2, .q_len = 40, .kv_len = 40};
  const ScoreMod by_distance = [](const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor& q,
                                  const at::Tensor& kv) { return -(q - kv).abs().to(at::kDouble); };
  Inputs inputs = inputs_of(shape);
  const at::Tensor out = flex_attention(inputs.query, inputs.key, inputs.value, by_distance);
  EXPECT_TRUE(near(dense_attention(inputs, by_distance, {}), out, 1e-10));
  out.sum().backward();
  EXPECT_EQ(inputs.query.grad().abs().sum().item<double>(), 0);

  const ScoreMod causal_mod = [](const at::Tensor& score, const at::Tensor&, const at::Tensor&, const at::Tensor& q,
                                 const at::Tensor& kv) {
    return at::where(q >= kv, score, -std::numeric_limits<double>::infinity());
  };
  expect_agreement(inputs_of(shape), causal_mod, std::nullopt);
}

TEST_F(AttentionTest, TakesAScale) {
  const Shape shape = {.batch = 2, .heads = 2, .kv_heads = 2, .q_len = 50, .kv_len = 50};
  expect_agreement(inputs_of(shape), nullptr, named_mask("causal", shape, 16), 0.7);
}

TEST_F(AttentionTest, TakesMasksMadeOfBlocksWithoutAFunction) {
  const BlockMask mask = BlockMask::from_kv_blocks({.num_blocks = at::tensor({1, 2}, at::kInt).view({1, 1, 2}),
                                                    .indices = at::tensor({1, 0, 0, 1}, at::kInt).view({1, 1, 2, 2})},
                                                   std::nullopt, 32, nullptr, SeqLengths{.q = 50, .kv = 60});
  expect_agreement(inputs_of({.q_len = 50, .kv_len = 60}), nullptr, mask);
}

TEST_F(AttentionTest, TakesChunksOfASplitMask) {
  const Shape shape = {.batch = 5, .heads = 2, .kv_heads = 2, .q_len = 70, .kv_len = 70};
  const Inputs inputs = inputs_of(shape);
  const BlockMask mask = *named_mask("documents", shape, 16);
  const at::Tensor whole = flex_attention(inputs.query, inputs.key, inputs.value, nullptr, mask);
  std::vector<at::Tensor> parts;
  std::int64_t first = 0;
  for (const BlockMask& chunk : mask.split(3)) {
    const auto rows = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, chunk.batch()); };
    parts.push_back(flex_attention(rows(inputs.query), rows(inputs.key), rows(inputs.value), nullptr, chunk));
    first += chunk.batch();
  }
  EXPECT_TRUE(same_tensor(whole, at::cat(parts)));
}

TEST_F(AttentionTest, TakesAnyStridesAndKeysWithBatchOne) {
  const auto leaf = [](at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).requires_grad_(); };
  // [batch, length, heads, size], as projections return them, and one with its last dimensions transposed.
  const at::Tensor query = leaf({2, 40, 4, 8});
  const at::Tensor key = leaf({1, 4, 8, 40});
  const at::Tensor value = leaf({1, 40, 4, 6});
  const Inputs inputs = {.query = query.transpose(1, 2), .key = key.transpose(2, 3), .value = value.transpose(1, 2)};
  const at::Tensor found = flex_attention(inputs.query, inputs.key, inputs.value);
  const at::Tensor expected = dense_attention(
      {.query = inputs.query, .key = inputs.key.expand({2, 4, 40, 8}), .value = inputs.value.expand({2, 4, 40, 6})},
      nullptr, {});
  EXPECT_TRUE(near(expected, found, 1e-10));
  const at::Tensor seed = at::randn_like(expected);
  const auto expected_gradients = torch::autograd::grad({expected}, {query, key, value}, {seed});
  const auto found_gradients = torch::autograd::grad({found}, {query, key, value}, {seed});
  for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(near(expected_gradients[i], found_gradients[i], 1e-10));
}

TEST_F(AttentionTest, IsBitwiseIdenticalOnAnyNumberOfThreads) {
  const int before = at::get_num_threads();
  for (const std::int64_t size : {8, 32, 64}) {
    for (const std::int64_t length : {33, 200}) {
      SCOPED_TRACE("size " + std::to_string(size) + ", length " + std::to_string(length));
      const Shape shape = {
          .batch = 2, .heads = 4, .kv_heads = 2, .q_len = length, .kv_len = length, .size = size, .value_size = size};
      const Inputs inputs = inputs_of(shape, at::kFloat);
      const BlockMask mask = *named_mask("window", shape, 32);
      const auto attend = [&] {
        return flex_attention(inputs.query, inputs.key, inputs.value, nullptr, mask, std::nullopt, true);
      };
      const auto run = [&](int threads) {
        at::set_num_threads(threads);
        const at::Tensor out = attend();
        std::vector<at::Tensor> results = torch::autograd::grad({out.square().sum()}, inputs.all());
        results.push_back(out);
        return results;
      };
      const auto one = run(1);
      const auto four = run(4);
      const at::Tensor inferred = [&] {
        const c10::InferenceMode inference;
        return attend().clone();
      }();
      EXPECT_TRUE(at::equal(one.back(), inferred));
      for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], four[i])) << i;
    }
  }
  at::set_num_threads(before);
}

class EveryType : public ::testing::TestWithParam<std::tuple<at::ScalarType, double>> {};

TEST_P(EveryType, IsAsNearToDoublePrecisionAsTheTypeAllows) {
  at::manual_seed(17);
  const auto [type, tolerance] = GetParam();
  const Shape shape = {
      .batch = 2, .heads = 4, .kv_heads = 2, .q_len = 300, .kv_len = 300, .size = 32, .value_size = 32};
  for (const char* const name : {"none", "causal", "window", "patchwork", "sparse"}) {
    for (const ScoreMod& score_mod : {ScoreMod(), ScoreMod(soft_cap)}) {
      SCOPED_TRACE(name);
      const std::optional<BlockMask> mask = named_mask(name, shape, 64);
      const Inputs inputs = inputs_of(shape, type);
      const auto twin = [](const at::Tensor& tensor) { return tensor.detach().to(at::kDouble).requires_grad_(); };
      const Inputs exact = {.query = twin(inputs.query), .key = twin(inputs.key), .value = twin(inputs.value)};
      const at::Tensor expected = dense_attention(exact, score_mod, mask ? mask->to_mask() : at::Tensor());
      const at::Tensor found =
          flex_attention(inputs.query, inputs.key, inputs.value, score_mod, mask, std::nullopt, true);
      EXPECT_EQ(found.scalar_type(), type);
      EXPECT_TRUE(near(expected, found, tolerance));
      const at::Tensor seed = at::randn(expected.sizes()).to(type);
      const auto expected_gradients = torch::autograd::grad({expected}, exact.all(), {seed.to(at::kDouble)});
      const auto found_gradients = torch::autograd::grad({found}, inputs.all(), {seed});
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(found_gradients[i].scalar_type(), type);
        const double size = std::max(1.0, expected_gradients[i].abs().max().item<double>());
        EXPECT_TRUE(near(expected_gradients[i], found_gradients[i], tolerance * size)) << "gradient " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Attention, EveryType,
                         ::testing::Values(std::tuple(at::kFloat, 5e-6), std::tuple(at::kDouble, 1e-12),
                                           std::tuple(at::kBFloat16, 3e-2)),
                         [](const auto& of) { return std::string(c10::toString(std::get<0>(of.param))); });

TEST_F(AttentionTest, StaysFiniteForLargeScoresAndLetsNanThrough) {
  const Shape shape = {.q_len = 80, .kv_len = 80};
  Inputs inputs = inputs_of(shape, at::kFloat);
  const at::Tensor large = flex_attention(inputs.query * 1e4, inputs.key * 1e4, inputs.value);
  EXPECT_TRUE(at::isfinite(large).all().item<bool>());
  EXPECT_TRUE(
      near(dense_attention({.query = inputs.query * 1e4, .key = inputs.key * 1e4, .value = inputs.value}, nullptr, {}),
           large, 1e-3));

  const at::NoGradGuard no_graph;
  inputs.query[0][0][3][0] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor out = flex_attention(inputs.query, inputs.key, inputs.value);
  EXPECT_TRUE(at::isnan(out[0][0][3]).all().item<bool>());
  EXPECT_EQ(at::isnan(out).sum().item<int>(), 8);
}

TEST_F(AttentionTest, TakesNoQueriesAndNoKeys) {
  const Inputs no_queries = inputs_of({.q_len = 0, .kv_len = 5});
  EXPECT_EQ(flex_attention(no_queries.query, no_queries.key, no_queries.value).sizes(), (at::IntArrayRef{1, 1, 0, 8}));
  const Inputs no_keys = inputs_of({.q_len = 5, .kv_len = 0});
  const at::Tensor out = flex_attention(no_keys.query, no_keys.key, no_keys.value);
  EXPECT_TRUE(same_tensor(at::zeros({1, 1, 5, 8}, at::kDouble), out.detach()));
}

TEST_F(AttentionTest, NeverAllocatesMoreThanAStripOfScores) {
  std::int64_t most = 0;
  const ScoreMod watching = [&most](const at::Tensor& score, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                    const at::Tensor&) {
    most = std::max(most, score.numel());
    return score * 1;
  };
  const Inputs inputs = inputs_of({.q_len = 1024, .kv_len = 1500});
  flex_attention(inputs.query, inputs.key, inputs.value, watching).sum().backward();
  EXPECT_EQ(most, AttentionPlan::kMaxRows * AttentionPlan::kMaxKeys);
}

TEST_F(AttentionTest, VisitsOnlyWhatTheMaskAllows) {
  at::Tensor visited = at::zeros({300, 300}, at::kBool);
  const ScoreMod watching = [&visited](const at::Tensor& score, const at::Tensor&, const at::Tensor&,
                                       const at::Tensor& q, const at::Tensor& kv) {
    visited.index_put_({q.flatten().unsqueeze(1), kv.flatten().unsqueeze(0)}, at::ones({}, at::kBool));
    return score;
  };
  const Inputs inputs = inputs_of({.q_len = 300, .kv_len = 300});
  const BlockMask mask = mask_of(patchwork(1, 1, 300, 300, 32), 32);
  flex_attention(inputs.query, inputs.key, inputs.value, watching, mask);
  const at::Tensor blocks = mask.to_dense()[0][0].to(at::kBool).repeat_interleave(32, 0).repeat_interleave(32, 1);
  EXPECT_FALSE(visited.logical_and(blocks.narrow(0, 0, 300).narrow(1, 0, 300).logical_not()).any().item<bool>());
  EXPECT_TRUE(visited.logical_or(mask.to_mask()[0][0].logical_not()).all().item<bool>());
}

TEST_F(AttentionTest, EvaluatesTheMaskFunctionOnceAndOnlyOnPartialBlocks) {
  auto asked = std::make_shared<at::Tensor>(at::zeros({64, 64}, at::kInt));
  const MaskMod watching = [asked](const at::Tensor&, const at::Tensor&, const at::Tensor& q, const at::Tensor& kv) {
    asked->index_put_({q, kv.unsqueeze(0)}, at::ones({}, at::kInt), /*accumulate=*/true);
    return q >= kv;
  };
  const BlockMask mask = create_block_mask(watching, std::nullopt, std::nullopt, 64, 64, 16);
  asked->zero_();
  const Inputs inputs = inputs_of({.q_len = 64, .kv_len = 64});
  for (int i = 0; i < 3; ++i) flex_attention(inputs.query, inputs.key, inputs.value, nullptr, mask).sum().backward();
  const at::Tensor diagonal = at::eye(4, at::kInt).repeat_interleave(16, 0).repeat_interleave(16, 1);
  EXPECT_TRUE(same_tensor(diagonal, *asked));
}

TEST_F(AttentionTest, StoresEqualPartsOfAMaskOnce) {
  const BlockMask mask = create_block_mask(causal, 3, 3, 256, 256, 64);
  const AttentionPlan& plan = plan_of(mask);
  const auto words_of = [&plan](std::int64_t batch, std::int64_t head, std::size_t strip) {
    return plan.part(plan.runs(plan.strips(batch, head)[strip]).back(), 0).words;
  };
  EXPECT_EQ(words_of(0, 0, 0), words_of(0, 0, 3));
  EXPECT_EQ(words_of(0, 0, 0), words_of(2, 1, 1));
}

TEST_F(AttentionTest, ComputesOnlyTheGradientsThatAreNeeded) {
  const Shape shape = {.heads = 2, .kv_heads = 2, .q_len = 50, .kv_len = 50};
  for (std::size_t needed = 0; needed < 3; ++needed) {
    const Inputs inputs = inputs_of(shape);
    std::vector<at::Tensor> given;
    for (const at::Tensor& tensor : inputs.all()) given.push_back(tensor.detach());
    given[needed].requires_grad_();
    const at::Tensor expected =
        torch::autograd::grad({dense_attention(inputs, nullptr, {}).sum()}, inputs.all())[needed];
    flex_attention(given[0], given[1], given[2]).sum().backward();
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(given[i].grad().defined(), i == needed);
    EXPECT_TRUE(near(expected, given[needed].grad(), 1e-10));
  }
}

TEST_F(AttentionTest, RefusesTensorsOfOtherKinds) {
  const at::Tensor good = at::zeros({2, 4, 8, 16});
  const auto attend = [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool gqa = false) {
    return message_of<AttentionError>(
        [&] { flex_attention(query, key, value, nullptr, std::nullopt, std::nullopt, gqa); });
  };
  EXPECT_EQ(attend(good, {}, good), "flex_attention: key is undefined; it should be a tensor.");
  EXPECT_EQ(attend(good[0], good, good),
            "flex_attention: query has shape [4, 8, 16]; it should be [batch, heads, length, size].");
  EXPECT_EQ(attend(good.to(at::kHalf), good, good),
            "flex_attention: query is of Half; it should be of Float, Double or BFloat16.");
  EXPECT_EQ(attend(good, good, good.to(at::kDouble)),
            "flex_attention: value is of Double and query of Float; they should be of the same type.");
  EXPECT_EQ(attend(good.to(at::kMeta), good, good),
            "flex_attention: query is a tensor of MetaFloatType; it should be a dense one on the CPU.");
  const std::string shapes = "flex_attention: query [2, 4, 8, 16], key ";
  EXPECT_EQ(attend(good, at::zeros({2, 4, 8, 15}), good),
            shapes + "[2, 4, 8, 15] and value [2, 4, 8, 16]: query and key should have the same last dimension.");
  EXPECT_EQ(attend(good, good, at::zeros({2, 4, 9, 16})),
            shapes + "[2, 4, 8, 16] and value [2, 4, 9, 16]: key and value should have the same length.");
  EXPECT_EQ(attend(good, good, at::zeros({2, 2, 8, 16})),
            shapes + "[2, 4, 8, 16] and value [2, 2, 8, 16]: key and value should have the same number of heads.");
  EXPECT_EQ(attend(good, at::zeros({3, 4, 8, 16}), good),
            shapes + "[3, 4, 8, 16] and value [2, 4, 8, 16]: key and value should have the query's batch, or 1.");
  const at::Tensor two_heads = at::zeros({2, 2, 8, 16});
  EXPECT_EQ(attend(good, two_heads, two_heads),
            shapes +
                "[2, 2, 8, 16] and value [2, 2, 8, 16]: query and key should have the same number of heads.\n"
                "  Hint: enable_gqa lets heads share keys.");
  const at::Tensor three_heads = at::zeros({2, 3, 8, 16});
  EXPECT_EQ(attend(good, three_heads, three_heads, true),
            shapes + "[2, 3, 8, 16] and value [2, 3, 8, 16]: the query's heads should be a multiple of the key's.");
}

TEST_F(AttentionTest, RefusesMasksOfOtherShapes) {
  const at::Tensor good = at::zeros({2, 4, 8, 16});
  const auto attend = [&good](const BlockMask& mask) {
    return message_of<AttentionError>([&] { flex_attention(good, good, good, nullptr, mask); });
  };
  const std::string rest = "; it should be for [2, 4, 8, 8], or have batch or heads 1.";
  EXPECT_EQ(attend(create_block_mask(causal, 3, 1, 8, 8)), "flex_attention: block_mask is for [3, 1, 8, 8]" + rest);
  EXPECT_EQ(attend(create_block_mask(causal, 1, 2, 8, 8)), "flex_attention: block_mask is for [1, 2, 8, 8]" + rest);
  EXPECT_EQ(attend(create_block_mask(causal, 1, 1, 8, 9)), "flex_attention: block_mask is for [1, 1, 8, 9]" + rest);
  EXPECT_EQ(attend(create_block_mask(causal, 1, 1, 8, 8).to(at::kMeta)),
            "flex_attention: block_mask is on meta; it should be on the CPU.");
}

TEST_F(AttentionTest, RefusesScoreModsThatReturnNoScoresOrHideTensorsThatRequireGrad) {
  const at::Tensor good = at::zeros({1, 1, 8, 16});
  const auto attend = [&good](const at::Tensor& answer) {
    const ScoreMod mod = [&answer](const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&) { return answer; };
    return message_of<AttentionError>([&] { flex_attention(good, good, good, mod); });
  };
  const std::string rest = " for scores of shape [1, 1, 8, 8]; it should return real numbers of that shape.";
  EXPECT_EQ(attend({}), "flex_attention: score_mod returned an undefined tensor" + rest);
  EXPECT_EQ(attend(at::ones({8, 8}, at::kLong)), "flex_attention: score_mod returned a tensor of Long" + rest);
  EXPECT_EQ(attend(at::ones({7, 8})), "flex_attention: score_mod returned a tensor of shape [7, 8]" + rest);
  const at::Tensor slopes = at::ones({1}).requires_grad_();
  EXPECT_EQ(message_of<AttentionError>([&] { flex_attention(good, good, good, alibi(slopes)); }),
            "flex_attention: score_mod uses a tensor that requires grad.\n  Hint: list such tensors in `captured`.");
  const at::NoGradGuard no_graph;
  EXPECT_NO_THROW(flex_attention(good, good, good, alibi(slopes)));
}

TEST_F(AttentionTest, RefusesToBeDifferentiatedTwice) {
  const Inputs inputs = inputs_of({.q_len = 9, .kv_len = 9});
  const at::Tensor out = flex_attention(inputs.query, inputs.key, inputs.value);
  const auto first = torch::autograd::grad({out.square().sum()}, inputs.all(), {}, true, /*create_graph=*/true);
  const std::string message =
      message_of<std::exception>([&] { torch::autograd::grad({first[0].square().sum()}, inputs.all()); });
  EXPECT_NE(message.find("flex_attention: its gradients cannot be differentiated again."), std::string::npos)
      << message;
}

// Compares with the results of PyTorch, which attention_reference.py has written.
TEST(AttentionReference, GivesTheSameResults) {
  std::size_t count = 0;
  for (const Case& reference : reference_cases("attention.pt")) {
    SCOPED_TRACE(reference.at("name").toStringRef());
    const auto tensor = [&reference](const char* name) { return reference.at(name).toTensor(); };
    const at::Tensor query = tensor("query");
    std::optional<BlockMask> mask;
    if (reference.at("allowed").isTensor()) mask = mask_of(tensor("allowed"), 32);
    const std::string modification = reference.at("score_mod").toStringRef();
    const ScoreMod score_mod = modification == "alibi"      ? alibi(slopes_of(query.size(1)))
                               : modification == "soft_cap" ? ScoreMod(soft_cap)
                                                            : nullptr;
    const at::Tensor out = flex_attention(query, tensor("key"), tensor("value"), score_mod, mask,
                                          reference.at("scale").toOptional<double>(), true);
    // PyTorch computes slopes in float32, and scores of narrower dtypes too.
    const double tolerance = query.scalar_type() == at::kBFloat16 ? 3e-2
                             : query.scalar_type() == at::kFloat  ? 5e-6
                             : modification == "alibi"            ? 1e-6
                                                                  : 1e-10;
    EXPECT_TRUE(near(tensor("out"), out, tolerance));
    EXPECT_EQ(out.scalar_type(), query.scalar_type());
    ++count;
  }
  EXPECT_EQ(count, 140U);
}

}  // namespace
}  // namespace penstock::internal::testing
