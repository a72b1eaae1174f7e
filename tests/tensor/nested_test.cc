#include "penstock/tensor/nested.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

TEST(Path, IsPrintedAsInPython) {
  const Path root("kwargs");
  const c10::IValue mask("mask");
  const Path inside(root, mask);
  const Path second(inside, std::size_t{1});
  const c10::IValue number(3);
  EXPECT_EQ(root.text(), "kwargs");
  EXPECT_EQ(inside.text(), "kwargs['mask']");
  EXPECT_EQ(second.text(), "kwargs['mask'][1]");
  EXPECT_EQ(Path(second, number).text(), "kwargs['mask'][1][3]");
}

TEST(NodeKind, TellsContainersFromLeaves) {
  EXPECT_EQ(node_kind(tuple({1})), NodeKind::Tuple);
  EXPECT_EQ(node_kind(named_tuple("Output", {"loss"}, {1})), NodeKind::Tuple);
  EXPECT_EQ(node_kind(list({1})), NodeKind::List);
  EXPECT_EQ(node_kind(c10::List<std::int64_t>({1})), NodeKind::List);
  EXPECT_EQ(node_kind(c10::List<at::Tensor>({counting({1})})), NodeKind::List);
  EXPECT_EQ(node_kind(dict({})), NodeKind::Dict);
  EXPECT_EQ(node_kind(c10::Dict<std::string, std::int64_t>()), NodeKind::Dict);
  for (const c10::IValue& leaf : {c10::IValue(counting({1})), c10::IValue(1), c10::IValue(0.5), c10::IValue(true),
                                  c10::IValue("relu"), c10::IValue(), c10::IValue(c10::Device(at::kCPU))}) {
    EXPECT_EQ(node_kind(leaf), NodeKind::Leaf) << text(leaf);
  }
}

TEST(Describe, IsAShortDescriptionOfAValue) {
  EXPECT_EQ(describe(counting({2, 3})), "float32 tensor of shape [2, 3]");
  EXPECT_EQ(describe(at::zeros({}, at::kBFloat16)), "bfloat16 tensor of shape []");
  EXPECT_EQ(describe(at::zeros({0}, at::kLong)), "int64 tensor of shape [0]");
  EXPECT_EQ(describe(5), "int 5");
  EXPECT_EQ(describe("relu"), "str 'relu'");
  EXPECT_EQ(describe(c10::IValue()), "None");
  EXPECT_EQ(describe(tuple({1, 2})), "tuple of 2");
  EXPECT_EQ(describe(list({1})), "list of 1");
  EXPECT_EQ(describe(dict({{"a", 1}, {"b", 2}})), "dict with 'a', 'b'");
  EXPECT_EQ(describe(dict({})), "empty dict");
  EXPECT_EQ(describe(at::Tensor()), "undefined tensor");
}

// A value with all kinds of containers, and its leaves with their paths.
c10::IValue example() {
  return tuple({1, dict({{"mask", list({2, tuple({})})}, {"b", named_tuple("Output", {"x", "y"}, {3, "four"})}}),
                dict({{7, c10::IValue()}})});
}
std::vector<std::pair<c10::IValue, std::string>> leaves_of_example() {
  return {{1, "args[0]"},
          {2, "args[1]['mask'][0]"},
          {3, "args[1]['b'][0]"},
          {"four", "args[1]['b'][1]"},
          {c10::IValue(), "args[2][7]"}};
}

TEST(Leaves, AreVisitedInOrderWithTheirPaths) {
  std::vector<std::pair<c10::IValue, std::string>> visited;
  const c10::IValue value = example();
  for_each_leaf(value, Path("args"),
                [&](const c10::IValue& leaf, const Path& path) { visited.emplace_back(leaf, path.text()); });
  const auto expected = leaves_of_example();
  ASSERT_EQ(visited.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same(expected[i].first, visited[i].first));
    EXPECT_EQ(expected[i].second, visited[i].second);
  }
}

TEST(Leaves, OfALeafAreItself) {
  std::string way;
  for_each_leaf(5, Path("target"), [&](const c10::IValue& leaf, const Path& path) {
    EXPECT_TRUE(same(5, leaf));
    way = path.text();
  });
  EXPECT_EQ(way, "target");
  EXPECT_TRUE(same(list({5}), list(flatten_args(5))));
}

TEST(Leaves, AreFlattenedInOrder) {
  std::vector<c10::IValue> expected;
  for (const auto& [leaf, way] : leaves_of_example()) expected.push_back(leaf);
  EXPECT_TRUE(same(list(expected), list(flatten_args(example()))));
  EXPECT_TRUE(flatten_args(tuple({list({}), dict({{"a", tuple({})}})})).empty());
}

TEST(MapLeaves, KeepsTheStructureAndVisitsInOrder) {
  std::int64_t next = 0;
  const c10::IValue mapped = map_leaves(example(), [&](const c10::IValue&) { return c10::IValue(next++); });
  const c10::IValue expected = tuple(
      {0, dict({{"mask", list({1, tuple({})})}, {"b", named_tuple("Output", {"x", "y"}, {2, 3})}}), dict({{7, 4}})});
  EXPECT_TRUE(same(expected, mapped));
}

TEST(MapLeaves, LeavesTheOriginalAsItWas) {
  const c10::IValue value = example();
  map_leaves(value, [](const c10::IValue&) { return c10::IValue(0); });
  EXPECT_TRUE(same(example(), value));
}

TEST(MapLeaves, KeepsTheTypeOfAListWhoseLeavesKeepTheirs) {
  const auto itself = [](const c10::IValue& leaf) { return leaf; };
  EXPECT_TRUE(map_leaves(c10::List<at::Tensor>({counting({2})}), itself).isTensorList());
  EXPECT_TRUE(map_leaves(c10::List<std::int64_t>({1}), itself).isIntList());
  EXPECT_TRUE(map_leaves(c10::List<at::Tensor>(), itself).isTensorList());
}

TEST(MapLeaves, DoesNotKeepTheTypeOfAListOrDictWhoseLeavesChangeTheirs) {
  const auto word = [](const c10::IValue&) { return c10::IValue("word"); };
  EXPECT_FALSE(map_leaves(c10::List<at::Tensor>({counting({2})}), word).isTensorList());
  EXPECT_FALSE(map_leaves(c10::List<std::int64_t>({1}), word).isIntList());
  c10::Dict<std::string, at::Tensor> named;
  named.insert("mask", counting({2}));
  EXPECT_NE(map_leaves(named, word).type()->repr_str(), "Dict[str, Tensor]");
}

std::string structure_of(const c10::IValue& expected, const c10::IValue& found) {
  return structure_difference(expected, found, Path("value"));
}

TEST(StructureDifference, IsEmptyWhereOnlyLeavesDiffer) {
  EXPECT_EQ(structure_of(1, counting({2})), "");
  EXPECT_EQ(structure_of(tuple({1, list({"a"}), dict({{"k", c10::IValue()}})}),
                         tuple({true, list({0.5}), dict({{"k", counting({1})}})})),
            "");
  EXPECT_EQ(structure_of(dict({{"a", 1}, {"b", list({})}}), dict({{"b", list({})}, {"a", 1}})), "");
  EXPECT_EQ(structure_of(list({counting({1})}), c10::List<at::Tensor>({counting({1})})), "");
}

TEST(StructureDifference, IsASentenceWithItsPath) {
  EXPECT_EQ(structure_of(tuple({1}), list({1})), "value: found list of 1, expected tuple of 1.");
  EXPECT_EQ(structure_of(tuple({1}), tuple({1, 2})), "value: found tuple of 2, expected tuple of 1.");
  EXPECT_EQ(structure_of(list({}), dict({})), "value: found empty dict, expected list of 0.");
  EXPECT_EQ(structure_of(dict({{"a", 1}}), dict({{"b", 1}})), "value: found dict with 'b', expected dict with 'a'.");
  EXPECT_EQ(structure_of(dict({}), dict({{"a", 1}})), "value: found dict with 'a', expected empty dict.");
  EXPECT_EQ(structure_of(dict({{"a", 1}, {"b", list({1})}}), dict({{"b", list({1, 2})}, {"a", 1}})),
            "value['b']: found list of 2, expected list of 1.");
  EXPECT_EQ(structure_of(tuple({1, list({2, dict({{"k", 3}})})}), tuple({1, list({2, dict({{"k", tuple({})}})})})),
            "value[1][1]['k']: found tuple of 0, expected int 3.");
  EXPECT_EQ(structure_of(tuple({1}), counting({2})), "value: found float32 tensor of shape [2], expected tuple of 1.");
}

TEST(FlattenArgsDetach, DetachesEachTensorAndKeepsItsRequiresGrad) {
  const at::Tensor leaf = counting({2}).requires_grad_();
  const at::Tensor computed = leaf * 2;
  const at::Tensor plain = counting({3}, at::kLong);
  const c10::IValue value = tuple({computed, dict({{"mask", list({plain, 5})}}), leaf});
  const DetachedArgs detached = flatten_args_detach(value);
  EXPECT_TRUE(same(value, detached.value));
  ASSERT_EQ(detached.leaves.size(), 4U);
  for (const std::size_t i : {0U, 1U, 3U}) {
    const at::Tensor& tensor = detached.leaves[i].toTensor();
    const at::Tensor original = flatten_args(value)[i].toTensor();
    EXPECT_TRUE(tensor.is_leaf()) << i;
    EXPECT_FALSE(tensor.is_same(original)) << i;
    EXPECT_TRUE(tensor.is_alias_of(original)) << i;
    EXPECT_EQ(tensor.requires_grad(), original.requires_grad()) << i;
  }
  EXPECT_TRUE(same(5, detached.leaves[2]));
  EXPECT_FALSE(computed.is_leaf());
}

TEST(FlattenArgsDetach, LeavesAnUndefinedTensorAsItIs) {
  const DetachedArgs detached = flatten_args_detach(tuple({at::Tensor(), counting({2})}));
  ASSERT_EQ(detached.leaves.size(), 2U);
  EXPECT_FALSE(detached.leaves[0].toTensor().defined());
}

TEST(FlattenArgsDetach, GivesTheLeavesOfItsValue) {
  const DetachedArgs detached = flatten_args_detach(tuple({counting({2}), list({counting({2}).requires_grad_()})}));
  const std::vector<at::Tensor> inside = extract_tensor_args(detached.value);
  ASSERT_EQ(inside.size(), detached.leaves.size());
  for (std::size_t i = 0; i < inside.size(); ++i) EXPECT_TRUE(inside[i].is_same(detached.leaves[i].toTensor())) << i;
}

TEST(FlattenArgsDetach, LeavesGradientsToTheDetached) {
  const at::Tensor x = counting({2}).requires_grad_();
  const DetachedArgs detached = flatten_args_detach(tuple({x}));
  const at::Tensor inside = detached.leaves[0].toTensor();
  (inside * 3).sum().backward();
  EXPECT_TRUE(same(at::full({2}, 3.0, at::kFloat), inside.grad()));
  EXPECT_FALSE(x.grad().defined());
}

TEST(ExtractTensorArgs, GivesTheTensorsAmongTheLeavesInOrder) {
  const at::Tensor a = counting({1});
  const at::Tensor b = counting({2});
  const at::Tensor c = counting({3});
  const c10::IValue value =
      tuple({1, dict({{"z", list({a, "word"})}, {"a", c10::List<at::Tensor>({b})}}), c10::IValue(), c});
  const std::vector<at::Tensor> tensors = extract_tensor_args(value);
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_TRUE(tensors[0].is_same(a));
  EXPECT_TRUE(tensors[1].is_same(b));
  EXPECT_TRUE(tensors[2].is_same(c));
  EXPECT_TRUE(extract_tensor_args(list({1, "word"})).empty());
}

// Returns the structure of a value as text, equal for equal structures: an independent comparison.
std::string skeleton(const c10::IValue& value) {  // NOLINT(misc-no-recursion): a tree
  std::string inside;
  if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) inside += skeleton(element) + ",";
    return "(" + inside + ")";
  }
  if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) inside += skeleton(element) + ",";
    return "[" + inside + "]";
  }
  if (!value.isGenericDict()) return ".";
  std::vector<std::string> items;
  for (const auto& item : value.toGenericDict()) items.push_back(text(item.key()) + ":" + skeleton(item.value()));
  std::sort(items.begin(), items.end());
  for (const std::string& item : items) inside += item + ",";
  return "{" + inside + "}";
}

// Replaces one leaf, mostly by a container.
c10::IValue changed(Random& random, const c10::IValue& value) {
  const auto count = static_cast<std::int64_t>(flatten_args(value).size());
  std::int64_t left = count > 0 ? random.between(0, count - 1) : -1;
  return map_leaves(value, [&](const c10::IValue& leaf) { return left-- == 0 ? random_value(random, 2, 1) : leaf; });
}

TEST(NestedValues, HaveStructuresThatDifferWhereTheyShould) {
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 20240229);
  const std::uint64_t count = from_environment("PENSTOCK_CASES", 2'000);
  std::uint64_t equal = 0;
  for (std::uint64_t number = 0; number < count; ++number) {
    Random random(seed, number);
    const c10::IValue one = random_value(random, 2, 3);
    const c10::IValue other = random.percent(80) ? changed(random, one) : random_value(random, 2, 3);
    const bool same_structure = skeleton(one) == skeleton(other);
    ASSERT_EQ(structure_of(one, other).empty(), same_structure)
        << "PENSTOCK_SEED=" << seed << ", case " << number << "\nexpected: " << text(one)
        << "\nfound:    " << text(other) << "\nit says:  " << structure_of(one, other);
    equal += same_structure ? 1 : 0;
  }
  std::cout << "PENSTOCK_SEED=" << seed << ": of " << count << " pairs " << equal << " have the same structure\n";
  EXPECT_GT(equal, count / 20);
  EXPECT_LT(equal, count - count / 20);
}

TEST(NestedValues, DetachToTheSameValues) {
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 20240229);
  const std::uint64_t count = from_environment("PENSTOCK_CASES", 2'000);
  for (std::uint64_t number = 0; number < count; ++number) {
    Random random(seed, number);
    const c10::IValue value = random_value(random, 2, 3);
    const DetachedArgs detached = flatten_args_detach(value);
    ASSERT_TRUE(same(value, detached.value)) << "PENSTOCK_SEED=" << seed << ", case " << number;
    ASSERT_TRUE(same(list(flatten_args(value)), list(detached.leaves)))
        << "PENSTOCK_SEED=" << seed << ", case " << number;
  }
}

}  // namespace
}  // namespace penstock::internal::testing
