#include "penstock/tensor/microbatch.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "penstock/tensor/nested.h"
#include "tests/tensor/chunks.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

// Specs

TEST(TensorChunkSpec, IsTheDimensionThatItSplits) {
  EXPECT_EQ(TensorChunkSpec(2).split_dim, 2);
  EXPECT_TRUE(TensorChunkSpec(2) == TensorChunkSpec(2));
  EXPECT_FALSE(TensorChunkSpec(2) == TensorChunkSpec(-2));
  EXPECT_TRUE(Replicate() == Replicate());
  EXPECT_EQ(DEFAULT_CHUNK_DIM, 0);
}

TEST(TensorChunkSpec, IsMadeOfATupleOfDimensions) {
  const c10::IValue specs = TensorChunkSpec::from_tuple(tuple({0, 0, 1}));
  EXPECT_EQ(spec_text(specs), "(TensorChunkSpec(0), TensorChunkSpec(0), TensorChunkSpec(1))");
  EXPECT_TRUE(equal_specs(specs, tuple({rows(), rows(), columns()})));
}

TEST(TensorChunkSpec, IsMadeOfADictOfDimensions) {
  const c10::IValue specs = TensorChunkSpec::from_dict(dict({{"id", 0}, {"mask", 1}}));
  EXPECT_TRUE(equal_specs(specs, dict({{"id", rows()}, {"mask", columns()}}))) << spec_text(specs);
}

TEST(TensorChunkSpec, IsMadeOfNestedDimensions) {
  const c10::IValue dims = tuple({-1, list({0, dict({{"mask", tuple({1})}})}), tuple({})});
  const c10::IValue expected =
      tuple({TensorChunkSpec(-1), list({rows(), dict({{"mask", tuple({columns()})}})}), tuple({})});
  EXPECT_TRUE(equal_specs(TensorChunkSpec::from_tuple(dims), expected));
  EXPECT_TRUE(equal_specs(TensorChunkSpec::from_dict(dict({{"x", dims}})), dict({{"x", expected}})));
}

TEST(TensorChunkSpec, OfATypedListOfDimensionsIsAListOfSpecs) {
  const c10::IValue specs = TensorChunkSpec::from_tuple(tuple({c10::List<std::int64_t>({0, 1})}));
  EXPECT_TRUE(equal_specs(specs, tuple({list({rows(), columns()})}))) << spec_text(specs);
}

TEST(TensorChunkSpec, OfAnythingButDimensionsIsAnErrorWithItsPath) {
  expect_error<ChunkError>([] { TensorChunkSpec::from_tuple(tuple({0, list({1, "two"})})); },
                           "TensorChunkSpec.from_tuple[1][1]: found str 'two', expected the int of a dimension.");
  expect_error<ChunkError>([] { TensorChunkSpec::from_dict(dict({{"mask", c10::IValue()}})); },
                           "TensorChunkSpec.from_dict['mask']: found None, expected the int of a dimension.");
}

TEST(Specs, ArePrintedWithTheirStructure) {
  EXPECT_EQ(spec_text(TensorChunkSpec(-1)), "TensorChunkSpec(-1)");
  EXPECT_EQ(spec_text(Replicate()), "Replicate()");
  EXPECT_EQ(spec_text(tuple({rows(), list({replicate(), tuple({})})})), "(TensorChunkSpec(0), [Replicate(), ()])");
}

TEST(Specs, AreEqualWhenTheirLeavesAre) {
  EXPECT_TRUE(equal_specs(tuple({rows(), replicate()}), tuple({TensorChunkSpec(0), Replicate()})));
  EXPECT_FALSE(equal_specs(rows(), columns()));
  EXPECT_FALSE(equal_specs(rows(), replicate()));
  EXPECT_FALSE(equal_specs(tuple({rows()}), list({rows()})));
  EXPECT_FALSE(equal_specs(tuple({rows()}), tuple({rows(), rows()})));
  EXPECT_FALSE(equal_specs(tuple({rows()}), rows()));
  EXPECT_FALSE(equal_specs(dict({{"a", rows()}}), dict({{"b", rows()}})));
}

TEST(Specs, AreEqualWhateverTheOrderOfTheirKeys) {
  EXPECT_TRUE(equal_specs(dict({{"a", rows()}, {"b", replicate()}}), dict({{"b", replicate()}, {"a", rows()}})));
}

TEST(Specs, WithReducersAreEqualWhenTheseAreTheSameObject) {
  const c10::IValue one = sum_reducer();
  const c10::IValue other = CustomReducer(0, [](const c10::IValue& so_far, const c10::IValue&) { return so_far; });
  EXPECT_TRUE(equal_specs(tuple({one}), tuple({one})));
  EXPECT_FALSE(equal_specs(one, other));
  EXPECT_TRUE(equal_specs(sum_reducer(), sum_reducer()));
}

// Splitting

std::vector<std::int64_t> row_counts(const std::vector<Args>& chunks) {
  std::vector<std::int64_t> counts;
  for (const Args& chunk : chunks) counts.push_back(chunk.at(0).toTensor().size(0));
  return counts;
}

// This test and the next are ports of PyTorch's tests of the same names.
TEST(Microbatch, SplitAndMerge) {
  const at::Tensor x0 = at::rand({128, 16});
  const at::Tensor x1 = at::rand({256, 16});
  const at::Tensor x2 = at::rand({512, 16});
  const Args args{x0, x1, x2};
  const c10::IValue kwargs = dict({{"x0", x0}, {"x1", x1}, {"x2", x2}});
  const SplitArgs chunks = split_args_kwargs_into_chunks(args, kwargs_of(kwargs), 2);
  ASSERT_EQ(chunks.args.size(), 2U);
  ASSERT_EQ(chunks.kwargs.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(chunks.args[i].at(0).toTensor().size(0), 64);
    EXPECT_EQ(chunks.args[i].at(1).toTensor().size(0), 128);
    EXPECT_EQ(chunks.kwargs[i].at("x2").toTensor().size(0), 256);
  }
  EXPECT_TRUE(same(tuple(args), merge_chunks(values_of(chunks.args), TensorChunkSpec::from_tuple(tuple({0, 0, 0})))));
  const c10::IValue spec = TensorChunkSpec::from_dict(dict({{"x0", 0}, {"x1", 0}, {"x2", 0}}));
  EXPECT_TRUE(same(kwargs, merge_chunks(values_of(chunks.kwargs), spec)));
}

TEST(Microbatch, ChunkSpecsGiveTheModelWhatItComputesOnTheWhole) {
  const at::Tensor weight = at::rand({8, 8}, at::kDouble);
  const auto model = [&](const at::Tensor& x, const at::Tensor& y, const at::Tensor& factor) {
    return (at::matmul(x, weight) + y.t()) * factor;
  };
  const at::Tensor x = at::rand({10, 8}, at::kDouble);
  const at::Tensor y = at::rand({8, 10}, at::kDouble);
  const at::Tensor factor = at::rand({8}, at::kDouble);
  const SplitArgs chunks = split_args_kwargs_into_chunks({x}, kwargs_of(dict({{"y", y}, {"factor", factor}})), 4,
                                                         TensorChunkSpec::from_tuple(tuple({0})),
                                                         dict({{"y", columns()}, {"factor", replicate()}}));
  std::vector<c10::IValue> outputs;
  for (std::size_t i = 0; i < chunks.args.size(); ++i) {
    outputs.emplace_back(model(chunks.args[i][0].toTensor(), chunks.kwargs[i].at("y").toTensor(),
                               chunks.kwargs[i].at("factor").toTensor()));
  }
  EXPECT_EQ(outputs.size(), 4U);
  EXPECT_TRUE(at::allclose(merge_chunks(outputs).toTensor(), model(x, y, factor)));
}

TEST(Split, MakesTheFirstChunksLongerByOne) {
  const SplitArgs chunks = split_args_kwargs_into_chunks({counting({10, 2})}, {}, 4);
  EXPECT_EQ(row_counts(chunks.args), (std::vector<std::int64_t>{3, 3, 2, 2}));
  EXPECT_EQ(chunks.kwargs.size(), 4U);
}

TEST(Split, MakesAsManyChunksAsTheSmallestDimensionHas) {
  const SplitArgs chunks = split_args_kwargs_into_chunks({counting({8, 2}), counting({5})},
                                                         kwargs_of(dict({{"mask", list({counting({3}), 1})}})), 4);
  EXPECT_EQ(row_counts(chunks.args), (std::vector<std::int64_t>{3, 3, 2}));
  EXPECT_EQ(chunks.kwargs.size(), 3U);
}

TEST(Split, ReplicatesLeavesThatAreNotTensors) {
  const c10::IValue kwargs = dict({{"p", 0.5}, {"names", list({"a", c10::IValue()})}});
  const SplitArgs chunks = split_args_kwargs_into_chunks({3, true}, kwargs_of(kwargs), 3);
  ASSERT_EQ(chunks.args.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(same(tuple({3, true}), tuple(chunks.args[i])));
    EXPECT_TRUE(same(kwargs, to_value(chunks.kwargs[i])));
  }
}

TEST(Split, OfNothingIsChunksOfNothing) {
  const SplitArgs chunks = split_args_kwargs_into_chunks({}, {}, 3);
  EXPECT_EQ(chunks.args, std::vector<Args>(3));
  EXPECT_EQ(chunks.kwargs.size(), 3U);
}

TEST(Split, ReplicatesTheTensorItselfWhereItsSpecSaysSo) {
  const at::Tensor x = counting({2, 2});
  const SplitArgs chunks = split_args_kwargs_into_chunks({x}, {}, 5, tuple({replicate()}));
  ASSERT_EQ(chunks.args.size(), 5U);
  for (const Args& chunk : chunks.args) EXPECT_TRUE(chunk[0].toTensor().is_same(x));
}

TEST(Split, ReplicatesAnUndefinedTensor) {
  const SplitArgs chunks = split_args_kwargs_into_chunks({at::Tensor(), counting({2})}, {}, 2);
  ASSERT_EQ(chunks.args.size(), 2U);
  EXPECT_FALSE(chunks.args[1][0].toTensor().defined());
}

TEST(Split, KeepsGradientsOfChunksOfLeavesOnly) {
  const at::Tensor leaf = counting({4}).requires_grad_();
  const at::Tensor computed = leaf * 2;
  const SplitArgs chunks = split_args_kwargs_into_chunks({leaf, computed}, {}, 2);
  EXPECT_TRUE(chunks.args[1][0].toTensor().retains_grad());
  EXPECT_FALSE(chunks.args[1][1].toTensor().retains_grad());
  EXPECT_TRUE(chunks.args[1][1].toTensor().requires_grad());
}

// In PyTorch the whole tensor requires grad after the first write, and the second write is an error.
TEST(Split, OfDataGivesEachChunkAGraphOfItsOwn) {
  const at::Tensor data = counting({4, 2});
  const at::Tensor weight = at::ones({2}).requires_grad_();
  const SplitArgs chunks = split_args_kwargs_into_chunks({data}, {}, 2);
  for (const Args& chunk : chunks.args) chunk[0].toTensor().add_(weight).mul(3).sum().backward();
  EXPECT_TRUE(same(at::full({2}, 12.0, at::kFloat), weight.grad()));
  EXPECT_FALSE(data.requires_grad());
  EXPECT_TRUE(same(counting({4, 2}) + 1, data));
}

TEST(Split, OfDataSharesItsVersionCounterWithTheWhole) {
  const at::Tensor data = counting({4, 2});
  const at::Tensor weight = at::ones({2}).requires_grad_();
  const SplitArgs chunks = split_args_kwargs_into_chunks({data}, {}, 2);
  const at::Tensor loss = (chunks.args[1][0].toTensor() * weight).sum();
  data.zero_();
  EXPECT_THROW(loss.backward(), c10::Error);
  EXPECT_TRUE(same(at::zeros({2, 2}), chunks.args[1][0]));
}

TEST(Split, OfConjugatedTensorsKeepsThemSo) {
  const at::Tensor z = at::complex(counting({4, 2}), counting({4, 2}) + 1);
  const SplitArgs chunks = split_args_kwargs_into_chunks({z.conj()}, {}, 2);
  EXPECT_TRUE(at::equal(chunks.args[1][0].toTensor().resolve_conj(), z.slice(0, 2).conj().resolve_conj()));
}

TEST(Split, WorksOnTensorsOfInferenceMode) {
  const c10::InferenceMode inference;
  const at::Tensor x = counting({4, 2});
  const SplitArgs chunks = split_args_kwargs_into_chunks({x}, {}, 2);
  EXPECT_TRUE(chunks.args[1][0].toTensor().is_inference());
  EXPECT_TRUE(at::equal(chunks.args[1][0].toTensor(), x.slice(0, 2)));
}

// PyTorch fails here: it calls retain_grad() on chunks that do not require grad.
TEST(Split, OfALeafThatRequiresGradWorksWithoutGradients) {
  const at::Tensor leaf = counting({4}).requires_grad_();
  const c10::AutoGradMode off(false);
  const SplitArgs chunks = split_args_kwargs_into_chunks({leaf}, {}, 2);
  EXPECT_FALSE(chunks.args[0][0].toTensor().requires_grad());
  EXPECT_TRUE(chunks.args[0][0].toTensor().is_alias_of(leaf));
}

TEST(Split, TakesSpecsByKey) {
  const c10::IValue kwargs = dict({{"x", counting({4, 2})}, {"y", counting({2, 4})}});
  const SplitArgs chunks =
      split_args_kwargs_into_chunks({}, kwargs_of(kwargs), 2, std::nullopt, dict({{"y", columns()}, {"x", rows()}}));
  EXPECT_EQ(chunks.kwargs[0].at("x").toTensor().sizes(), (std::vector<std::int64_t>{2, 2}));
  EXPECT_EQ(chunks.kwargs[0].at("y").toTensor().sizes(), (std::vector<std::int64_t>{2, 2}));
}

TEST(Split, MasksWholeTensorsForDebugging) {
  const DebugMask debug(true);
  const SplitArgs chunks = split_args_kwargs_into_chunks({counting({2, 3}) + 1}, {}, 2, tuple({columns()}));
  ASSERT_EQ(chunks.args.size(), 2U);
  const at::Tensor first = at::tensor({1, 2, 0, 4, 5, 0}, at::kFloat).view({2, 3});
  const at::Tensor second = at::tensor({0, 0, 3, 0, 0, 6}, at::kFloat).view({2, 3});
  EXPECT_TRUE(same(first, chunks.args[0][0]));
  EXPECT_TRUE(same(second, chunks.args[1][0]));
}

void expect_split_error(const Args& args, const Items& kwargs, const std::optional<c10::IValue>& args_spec,
                        const std::optional<c10::IValue>& kwargs_spec, const std::string& message) {
  expect_error<ChunkError>(
      [&] { split_args_kwargs_into_chunks(args, kwargs_of(dict(kwargs)), 2, args_spec, kwargs_spec); }, message);
}
// Returns the error for kwargs { 'mask': [1, tensor] } with this spec.
void expect_kwargs_error(const c10::IValue& mask_spec, const std::string& message) {
  expect_split_error({}, {{"mask", list({1, counting({4, 2})})}}, std::nullopt, dict({{"mask", mask_spec}}), message);
}

TEST(Split, IntoNoChunksIsAnError) {
  for (const int chunks : {0, -1}) {
    expect_error<ChunkError>([&] { split_args_kwargs_into_chunks({1}, {}, chunks); },
                             "arguments can be split into 1 or more chunks, not into " + std::to_string(chunks) + ".");
  }
}

TEST(Split, NamesADimensionThatIsNotThere) {
  expect_split_error({tuple({counting({4, 2})})}, {}, tuple({tuple({TensorChunkSpec(2)})}), std::nullopt,
                     "args[0][0]: found float32 tensor of shape [4, 2], which has no dimension 2 to split.");
  expect_split_error({counting({4, 2})}, {}, tuple({TensorChunkSpec(-3)}), std::nullopt,
                     "args[0]: found float32 tensor of shape [4, 2], which has no dimension -3 to split.");
  expect_split_error({1, at::zeros({})}, {}, std::nullopt, std::nullopt,
                     "args[1]: found float32 tensor of shape [], which has no dimension 0 to split.\n"
                     "  Hint: Replicate() gives each chunk the whole value.");
}

TEST(Split, NamesADimensionOfSizeZero) {
  expect_split_error({}, {{"mask", list({at::zeros({0, 3})})}}, std::nullopt, std::nullopt,
                     "kwargs['mask'][0]: found float32 tensor of shape [0, 3], which has nothing to split along "
                     "dimension 0.");
}

TEST(Split, NamesAMissingOrExtraSpec) {
  const at::Tensor x = counting({4});
  expect_split_error({x, x}, {}, tuple({rows()}), std::nullopt,
                     "args: found tuple of 2, but its spec is (TensorChunkSpec(0)).");
  expect_split_error({x}, {}, tuple({rows(), replicate()}), std::nullopt,
                     "args: found tuple of 1, but its spec is (TensorChunkSpec(0), Replicate()).");
  expect_split_error({}, {{"mask", x}}, std::nullopt, dict({}), "kwargs: found dict with 'mask', but its spec is {}.");
  expect_kwargs_error(list({replicate()}), "kwargs['mask']: found list of 2, but its spec is [Replicate()].");
}

TEST(Split, NamesAKeyWithoutSpec) {
  try {
    split_args_kwargs_into_chunks({}, kwargs_of(dict({{"mask", 1}})), 2, std::nullopt, dict({{"musk", replicate()}}));
    ADD_FAILURE() << "no error";
  } catch (const ChunkError& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("kwargs['mask']: ", 0), 0U) << message;
    EXPECT_NE(message.find("musk"), std::string::npos) << message;
  }
}

TEST(Split, NamesSpecsOfAnotherStructure) {
  expect_kwargs_error(tuple({replicate(), rows()}),
                      "kwargs['mask']: found list of 2, but its spec is (Replicate(), TensorChunkSpec(0)).");
  expect_kwargs_error(rows(), "kwargs['mask']: found list of 2, but its spec is TensorChunkSpec(0).");
  expect_kwargs_error(list({replicate(), list({rows()})}),
                      "kwargs['mask'][1]: found float32 tensor of shape [4, 2], but its spec is [TensorChunkSpec(0)].");
  expect_split_error({counting({4})}, {}, rows(), std::nullopt,
                     "args: found tuple of 1, but its spec is TensorChunkSpec(0).");
}

TEST(Split, NamesWhatCannotBeSplit) {
  expect_kwargs_error(list({rows(), rows()}), "kwargs['mask'][0]: found int 1, which TensorChunkSpec(0) cannot split.");
}

TEST(Split, NamesASpecThatSplitsNothing) {
  expect_kwargs_error(list({replicate(), c10::IValue()}),
                      "kwargs['mask'][1]: its spec is None, expected TensorChunkSpec(dim) or Replicate().");
  expect_kwargs_error(list({replicate(), 0}),
                      "kwargs['mask'][1]: its spec is int 0, expected TensorChunkSpec(dim) or Replicate().");
  expect_kwargs_error(list({replicate(), sum_reducer()}),
                      "kwargs['mask'][1]: a reducer merges chunks, it cannot split a value.");
}

// Merging

TEST(Merge, ConcatenatesAllLeavesAlongDimensionZeroWithoutASpec) {
  const c10::IValue chunk = tuple({counting({1, 2}), dict({{"loss", counting({1})}})});
  const c10::IValue expected = tuple({counting({1, 2}).repeat({3, 1}), dict({{"loss", at::zeros({3})}})});
  EXPECT_TRUE(same(expected, merge_chunks({chunk, chunk, chunk})));
}

TEST(Merge, CountsANegativeDimensionFromTheLastOfTheTensorsItConcatenates) {
  const at::Tensor x = counting({5, 3});
  const SplitArgs chunks = split_args_kwargs_into_chunks({x}, {}, 2, tuple({TensorChunkSpec(-2)}));
  std::vector<c10::IValue> reshaped;
  for (const Args& chunk : chunks.args) reshaped.emplace_back(chunk[0].toTensor().unsqueeze(0));
  EXPECT_TRUE(same(x.unsqueeze(0), merge_chunks(reshaped, TensorChunkSpec(-2))));
}

TEST(Merge, FoldsAReducerInTheOrderOfChunks) {
  const CustomReducer spell(">", [](const c10::IValue& so_far, const c10::IValue& chunk) -> c10::IValue {
    return so_far.toStringRef() + chunk.toStringRef();
  });
  EXPECT_TRUE(same(tuple({">abc", 7}),
                   merge_chunks({tuple({"a", 7}), tuple({"b", 7}), tuple({"c", 7})}, tuple({spell, replicate()}))));
}

TEST(Merge, ReducesLossesAsItsReducerSays) {
  const LossReducer greatest(at::full({}, -1.0, at::kFloat),
                             [](const c10::IValue& so_far, const c10::IValue& chunk) -> c10::IValue {
                               return at::maximum(so_far.toTensor(), chunk.toTensor());
                             });
  const at::Tensor two = at::full({}, 2.0, at::kFloat);
  EXPECT_TRUE(same(two, merge_chunks({at::zeros({}), two, at::ones({})}, greatest)));
}

TEST(Merge, SumsTensorsFromZero) {
  EXPECT_TRUE(same(at::full({}, 6.0, at::kFloat),
                   merge_chunks({at::ones({}), at::full({}, 2.0), at::full({}, 3.0)}, sum_reducer())));
  EXPECT_TRUE(same(counting({2, 2}), merge_chunks({counting({2, 2})}, sum_reducer())));
}

TEST(Merge, SumsNumbersToATensor) {
  EXPECT_TRUE(same(at::full({}, 3.0, at::kFloat), merge_chunks({1, 2}, sum_reducer())));
  EXPECT_TRUE(same(at::full({}, 2.5, at::kFloat), merge_chunks({0.5, true, 1}, sum_reducer())));
}

TEST(Merge, OfReplicatedValuesIsOneOfThem) {
  const at::Tensor x = counting({2, 2});
  const c10::IValue chunk = tuple({x, 5, "relu", c10::IValue(), 0.5, true});
  const c10::IValue copy = tuple({x.clone(), 5, "relu", c10::IValue(), 0.5, true});
  const c10::IValue spec = tuple(std::vector<c10::IValue>(6, replicate()));
  EXPECT_TRUE(same(chunk, merge_chunks({chunk, copy, chunk}, spec)));
}

TEST(Merge, OfReplicatedNaNsIsNaN) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(same(nan, merge_chunks({nan, nan}, replicate())));
  const at::Tensor x = at::tensor({nan, 1.0}, at::kFloat);
  EXPECT_TRUE(same(x, merge_chunks({x, x.clone()}, replicate())));
}

TEST(Merge, OfReplicatedUndefinedTensorsIsUndefined) {
  EXPECT_TRUE(same(at::Tensor(), merge_chunks({at::Tensor(), at::Tensor()}, replicate())));
}

TEST(Merge, MatchesDictsByKey) {
  const auto chunk = [](bool a_first) {
    return a_first ? dict({{"a", at::zeros({1})}, {"b", at::ones({1})}})
                   : dict({{"b", at::ones({1})}, {"a", at::zeros({1})}});
  };
  const c10::IValue expected = dict({{"a", at::zeros({3})}, {"b", at::ones({3})}});
  EXPECT_TRUE(same(expected, merge_chunks({chunk(true), chunk(false), chunk(true)})));
  EXPECT_TRUE(
      same(expected, merge_chunks({chunk(true), chunk(true), chunk(false)}, dict({{"b", rows()}, {"a", rows()}}))));
}

TEST(Merge, TakesEachMaskedChunksOwnPart) {
  const DebugMask debug(true);
  const at::Tensor whole = counting({5, 2});
  // Values outside of a chunk's own rows are ignored.
  const std::vector<c10::IValue> chunks{whole.clone(), whole.clone()};
  chunks[0].toTensor().slice(0, 3).zero_();
  chunks[1].toTensor().slice(0, 0, 3).fill_(-1);
  EXPECT_TRUE(same(whole, merge_chunks(chunks, rows())));
  EXPECT_TRUE(same(whole, merge_chunks(chunks)));
}

TEST(Merge, RefusesMaskedChunksOfDifferentShapes) {
  const DebugMask debug(true);
  EXPECT_THROW(merge_chunks({counting({4, 2}), counting({6, 2})}, rows()), ChunkError);
}

TEST(Merge, CanBeCheckedWithoutCallingReducers) {
  const CustomReducer reducer(0, [](const c10::IValue&, const c10::IValue&) -> c10::IValue {
    ADD_FAILURE() << "a reducer was called";
    return {};
  });
  require_mergeable({tuple({counting({4, 2}), 1}), tuple({counting({3, 2}), 2})}, tuple({rows(), reducer}));
  require_mergeable({counting({4, 2}), counting({3, 2})});
}

TEST(Merge, OfNoChunksIsAnError) {
  expect_error<ChunkError>([] { merge_chunks({}); }, "there is no chunk to merge.");
  expect_error<ChunkError>([] { require_mergeable({}); }, "there is no chunk to merge.");
  expect_error<ChunkError>([] { merge_chunks({}, sum_reducer()); }, "there is no chunk to merge.");
}

// Returns the error for two chunks { 'mask': [1, tensor] }, the second with another list.
void expect_merge_error(const c10::IValue& second, const std::string& message) {
  const std::vector<c10::IValue> chunks{dict({{"mask", list({1, counting({4, 2})})}}), second};
  const c10::IValue spec = dict({{"mask", list({replicate(), rows()})}});
  expect_error<ChunkError>([&] { merge_chunks(chunks, spec); }, message);
  expect_error<ChunkError>([&] { require_mergeable(chunks, spec); }, message);
}
// The same for an error in the structure of a chunk, which also shows the spec.
void expect_structure_error(const c10::IValue& second, const std::string& message) {
  try {
    merge_chunks({dict({{"mask", list({1, counting({4, 2})})}}), second},
                 dict({{"mask", list({replicate(), rows()})}}));
    ADD_FAILURE() << "no error, instead of: " << message;
  } catch (const ChunkError& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.substr(0, text.find('\n')), message);
    EXPECT_NE(text.find("[Replicate(), TensorChunkSpec(0)]"), std::string::npos) << text;
  }
}

TEST(Merge, NamesAMissingOrExtraLeaf) {
  const at::Tensor x = counting({4, 2});
  expect_structure_error(dict({{"mask", list({1})}}), "chunks[1]['mask']: found list of 1, expected list of 2.");
  expect_structure_error(dict({{"mask", list({1, x, x})}}), "chunks[1]['mask']: found list of 3, expected list of 2.");
  expect_structure_error(dict({}), "chunks[1]: found empty dict, expected dict with 'mask'.");
  expect_structure_error(dict({{"mask", list({1, x})}, {"b", 1}}),
                         "chunks[1]: found dict with 'mask', 'b', expected dict with 'mask'.");
  expect_structure_error(dict({{"musk", list({1, x})}}),
                         "chunks[1]: found dict with 'musk', expected dict with 'mask'.");
}

TEST(Merge, NamesAnotherStructure) {
  const at::Tensor x = counting({4, 2});
  expect_structure_error(dict({{"mask", tuple({1, x})}}), "chunks[1]['mask']: found tuple of 2, expected list of 2.");
  expect_structure_error(dict({{"mask", 3}}), "chunks[1]['mask']: found int 3, expected list of 2.");
  expect_error<ChunkError>([&] { merge_chunks({tuple({x}), list({x})}); },
                           "chunks[1]: found list of 1, expected tuple of 1.");
  expect_error<ChunkError>([&] { merge_chunks({x, tuple({x})}); },
                           "chunks[1]: found tuple of 1, expected float32 tensor of shape [4, 2].");
}

TEST(Merge, NamesAContainerInPlaceOfALeaf) {
  expect_structure_error(dict({{"mask", list({1, list({counting({4, 2})})})}}),
                         "chunks[1]['mask'][1]: found list of 1, expected TensorChunkSpec(0).");
}

TEST(Merge, NamesAScalarInPlaceOfATensor) {
  expect_merge_error(dict({{"mask", list({1, 2})}}), "chunks[1]['mask'][1]: found int 2, expected a tensor to join.");
  expect_error<ChunkError>([] { merge_chunks({tuple({counting({2}), "a"}), tuple({counting({2}), "a"})}); },
                           "chunks[0][1]: found str 'a', expected a tensor to join.");
}

TEST(Merge, NamesAShapeThatDoesNotFit) {
  expect_merge_error(dict({{"mask", list({1, counting({4, 3})})}}),
                     "chunks[1]['mask'][1]: found float32 tensor of shape [4, 3], which cannot follow "
                     "chunks[0]['mask'][1], float32 tensor of shape [4, 2], along dimension 0.");
  expect_error<ChunkError>(
      [] { merge_chunks({tuple({counting({4, 2})})}, tuple({TensorChunkSpec(2)})); },
      "chunks[0][0]: found float32 tensor of shape [4, 2], which has no dimension 2 to join along.");
  expect_error<ChunkError>([] { merge_chunks({at::zeros({}), at::zeros({})}); },
                           "chunks[0]: found float32 tensor of shape [], which has no dimension 0 to join along.\n"
                           "  Hint: a reducer, such as sum_reducer(), merges scalars.");
}

TEST(Merge, NamesReplicatedValuesThatDiffer) {
  expect_merge_error(dict({{"mask", list({2, counting({4, 2})})}}),
                     "chunks[1]['mask'][0]: found int 2, expected it to equal chunks[0]['mask'][0], int 1, since it is "
                     "replicated.");
  const at::Tensor x = counting({2});
  EXPECT_THROW(merge_chunks({x, x + 1}, replicate()), ChunkError);
  EXPECT_THROW(merge_chunks({x, x.to(at::kDouble)}, replicate()), ChunkError);
  EXPECT_THROW(merge_chunks({x, x.unsqueeze(0)}, replicate()), ChunkError);
  EXPECT_THROW(merge_chunks({1, true}, replicate()), ChunkError);
  EXPECT_THROW(merge_chunks({1, 1.0}, replicate()), ChunkError);
  EXPECT_THROW(merge_chunks({"a", "b"}, replicate()), ChunkError);
  EXPECT_THROW(merge_chunks({c10::IValue(), 0}, replicate()), ChunkError);
}

TEST(Merge, NamesWhatASumCannotTake) {
  for (const c10::IValue& second : {c10::IValue("a"), c10::IValue(), c10::IValue(counting({3, 2}))}) {
    try {
      merge_chunks({tuple({1, counting({4, 2})}), tuple({1, second})}, tuple({replicate(), sum_reducer()}));
      ADD_FAILURE() << "no error for " << text(second);
    } catch (const ChunkError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("chunks[1][1]: ", 0), 0U) << error.what();
    }
  }
}

TEST(Merge, NamesASpecThatMergesNothing) {
  expect_error<ChunkError>(
      [] { merge_chunks({list({1, 2})}, list({replicate(), "zero"})); },
      "the spec of chunks[1] is str 'zero', expected TensorChunkSpec(dim), Replicate() or a reducer.");
}

// Other structures

TEST(Microbatch, KeepsNamedTuples) {
  const c10::IValue value = named_tuple("Output", {"logits", "step"}, {counting({4, 2}), 7});
  for (const c10::IValue& spec :
       {tuple({rows(), replicate()}), named_tuple("Output", {"logits", "step"}, {rows(), replicate()})}) {
    const SplitArgs chunks = split_args_kwargs_into_chunks({value}, {}, 2, tuple({spec}));
    ASSERT_EQ(chunks.args.size(), 2U);
    EXPECT_TRUE(
        same(named_tuple("Output", {"logits", "step"}, {counting({4, 2}).slice(0, 0, 2), 7}), chunks.args[0][0]));
    EXPECT_TRUE(same(value, merge_chunks({chunks.args[0][0], chunks.args[1][0]}, spec)));
  }
}

TEST(Microbatch, KeepsTypedListsAndDicts) {
  const c10::List<at::Tensor> tensors({counting({4}), counting({4, 2})});
  c10::Dict<std::string, at::Tensor> named;
  named.insert("mask", counting({2, 4}));
  const Args args{tensors, c10::List<std::int64_t>({1, 2}), named};
  const c10::IValue spec =
      tuple({list({rows(), rows()}), list({replicate(), replicate()}), dict({{"mask", columns()}})});
  const SplitArgs chunks = split_args_kwargs_into_chunks(args, {}, 2, spec);
  EXPECT_EQ(chunks.args[1][0].toTensorVector().at(1).size(0), 2);
  EXPECT_EQ(chunks.args[1][1].toIntVector(), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ((chunks.args[1][2].to<c10::Dict<std::string, at::Tensor>>().at("mask").size(1)), 2);
  const c10::IValue merged = merge_chunks(values_of(chunks.args), spec);
  EXPECT_TRUE(same(tuple(args), merged));
  for (std::size_t i = 0; i < args.size(); ++i) {
    EXPECT_EQ(merged.toTupleRef().elements()[i].type()->repr_str(), args[i].type()->repr_str());
  }
}

TEST(Microbatch, DoesNotCallAListOfReducedNumbersAListOfTensors) {
  const CustomReducer count(
      0, [](const c10::IValue& so_far, const c10::IValue&) -> c10::IValue { return so_far.toInt() + 1; });
  const c10::List<at::Tensor> chunk({counting({4})});
  const c10::IValue merged = merge_chunks({chunk, chunk}, list({count}));
  EXPECT_TRUE(same(list({2}), merged));
  EXPECT_FALSE(merged.isTensorList());
}

// Random values

c10::IValue random_spec(Random& random, const c10::IValue& value) {
  return map_leaves(value, [&](const c10::IValue& leaf) -> c10::IValue {
    if (!leaf.isTensor() || random.percent(20)) return Replicate();
    const at::Tensor& tensor = leaf.toTensor();
    std::vector<std::int64_t> dims;
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.size(dim) > 0) dims.push_back(dim);
    }
    if (dims.empty()) return Replicate();
    return TensorChunkSpec(random.element_of(dims) - (random.percent(50) ? tensor.dim() : 0));
  });
}

// Concatenated tensors are contiguous and not leaves, so only their values are compared.
c10::IValue held(const c10::IValue& value) {
  return map_leaves(value, [](const c10::IValue& leaf) -> c10::IValue {
    if (!leaf.isTensor()) return leaf;
    return leaf.toTensor().detach().clone(at::MemoryFormat::Contiguous);
  });
}

TEST(Microbatch, MergesAnyValueThatItSplits) {
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 20240229);
  const std::uint64_t count = from_environment("PENSTOCK_CASES", 2'000);
  std::map<std::size_t, int> chunk_counts;
  for (std::uint64_t number = 0; number < count; ++number) {
    Random random(seed, number);
    const std::int64_t length = random.between(1, 6);
    const c10::IValue value = random_value(random, length, 3);
    const c10::IValue kwargs = dict({{"x", random_value(random, length, 2)}, {"y", random_value(random, length, 1)}});
    const c10::IValue args_spec = tuple({random_spec(random, value)});
    const c10::IValue kwargs_spec = random_spec(random, kwargs);
    const DebugMask debug(random.percent(20));
    const auto name = [&] {
      return "PENSTOCK_SEED=" + std::to_string(seed) + ", case " + std::to_string(number) + ": " + text(value) + ", " +
             text(kwargs) + " by " + spec_text(args_spec) + ", " + spec_text(kwargs_spec);
    };
    try {
      const SplitArgs chunks =
          split_args_kwargs_into_chunks({value}, kwargs_of(kwargs), random.between(1, 4), args_spec, kwargs_spec);
      ASSERT_EQ(chunks.args.size(), chunks.kwargs.size()) << name();
      ++chunk_counts[chunks.args.size()];
      ASSERT_TRUE(same(held(tuple({value})), held(merge_chunks(values_of(chunks.args), args_spec)))) << name();
      ASSERT_TRUE(same(held(kwargs), held(merge_chunks(values_of(chunks.kwargs), kwargs_spec)))) << name();
    } catch (const std::exception& error) {
      FAIL() << name() << "\n" << error.what();
    }
  }
  std::cout << "PENSTOCK_SEED=" << seed << ": " << count << " values;";
  for (const auto& [chunks, times] : chunk_counts) std::cout << " " << times << " in " << chunks << ";";
  std::cout << "\n";
}

}  // namespace
}  // namespace penstock::internal::testing
