#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "penstock/transport/transport.h"
#include "tests/tensor/values.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

class EveryGroup : public ::testing::TestWithParam<WorldCase> {
 protected:
  World world() const { return {GetParam().carrier, GetParam().ranks}; }
};
INSTANTIATE_TEST_SUITE_P(Transport, EveryGroup, ::testing::ValuesIn(worlds(/*fewest_ranks=*/1)), case_name);

// Returns all groups of the ranks, and one in reverse order.
std::vector<std::vector<int>> groups_of(int ranks) {
  std::vector<std::vector<int>> groups;
  for (unsigned chosen = 1; chosen < 1U << static_cast<unsigned>(ranks); ++chosen) {
    std::vector<int>& group = groups.emplace_back();
    for (int rank = 0; rank < ranks; ++rank) {
      if ((chosen >> static_cast<unsigned>(rank)) & 1U) group.push_back(rank);
    }
  }
  groups.push_back(groups.back());
  std::reverse(groups.back().begin(), groups.back().end());
  return groups;
}

// Calls act(group) for each group that the rank is a member of.
void for_each_group(Transport& transport, const std::function<void(Group&)>& act) {
  for (const std::vector<int>& ranks : groups_of(transport.ranks())) {
    const auto self = std::find(ranks.begin(), ranks.end(), transport.rank());
    if (self == ranks.end()) continue;
    const auto group = transport.group(ranks);
    EXPECT_EQ(group->size(), static_cast<int>(ranks.size()));
    EXPECT_EQ(group->member(), self - ranks.begin());
    act(*group);
    // No member leaves before all have completed.
    group->barrier()->wait(far());
  }
}

// Returns the tensor that a member contributes: small integers, whose sums are exact in every dtype.
at::Tensor contribution_of(at::IntArrayRef shape, at::ScalarType dtype, int member) {
  return (at::arange(c10::multiply_integers(shape), at::kLong) % 5 + member).view(shape).to(dtype);
}
at::Tensor sum(at::IntArrayRef shape, at::ScalarType dtype, int members) {
  at::Tensor all = contribution_of(shape, dtype, 0);
  for (int member = 1; member < members; ++member) all = all + contribution_of(shape, dtype, member);
  return all;
}

// Small and large tensors, and one without elements.
const std::vector<std::vector<std::int64_t>> kShapes = {{3}, {2, 5}, {}, {0, 3}, {300, 257}, {1}};

TEST_P(EveryGroup, SumsTensorsOfEveryType) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      for (const at::ScalarType dtype : kDtypes) {
        if (dtype == at::kBool) continue;
        SCOPED_TRACE(c10::toString(dtype));
        std::vector<at::Tensor> tensors;
        for (const auto& shape : kShapes) tensors.push_back(contribution_of(shape, dtype, group.member()));
        group.all_reduce(tensors)->wait(far());
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          EXPECT_TRUE(same(sum(kShapes[i], dtype, group.size()), tensors[i]));
        }
      }
    });
  });
}

TEST_P(EveryGroup, SumsTensorsOfSeveralTypesAndLayoutsAtOnce) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      const at::Tensor first = contribution_of({4}, at::kFloat, group.member());
      const at::Tensor transposed = contribution_of({600, 300}, at::kDouble, group.member()).t();
      const at::Tensor small_transposed = contribution_of({6, 3}, at::kDouble, group.member()).t();
      const at::Tensor whole_numbers = contribution_of({4}, at::kLong, group.member());
      group.all_reduce({first, transposed, small_transposed, whole_numbers})->wait(far());
      EXPECT_TRUE(same(sum({4}, at::kFloat, group.size()), first));
      EXPECT_TRUE(same(sum({600, 300}, at::kDouble, group.size()).t(), transposed));
      EXPECT_TRUE(same(sum({6, 3}, at::kDouble, group.size()).t(), small_transposed));
      EXPECT_TRUE(same(sum({4}, at::kLong, group.size()), whole_numbers));
    });
  });
}

// The sums of these numbers depend on the order.
TEST_P(EveryGroup, SumsSmallTensorsInTheOrderOfMembers) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      const auto rounded = [](int member) { return (at::arange(100, at::kFloat) + 0.1).pow(member + 1.3); };
      at::Tensor expected = rounded(0);
      for (int member = 1; member < group.size(); ++member) expected = expected + rounded(member);
      at::Tensor found = rounded(group.member());
      group.all_reduce({found})->wait(far());
      EXPECT_TRUE(same(expected, found));

      at::Tensor part = at::empty({std::int64_t{100} * group.size()}).narrow(0, 0, 100);
      group.reduce_scatter(part, rounded(group.member()).repeat({group.size()}))->wait(far());
      EXPECT_TRUE(same(expected, part));
    });
  });
}

TEST_P(EveryGroup, GathersTheParts) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      for (const at::ScalarType dtype : kDtypes) {
        for (const auto& shape : kShapes) {
          std::vector<at::Tensor> parts;
          for (int member = 0; member < group.size(); ++member)
            parts.push_back(contribution_of(shape, dtype, member).view(-1));
          const at::Tensor whole = at::empty({parts.front().numel() * group.size()}, dtype);
          group.all_gather(whole, contribution_of(shape, dtype, group.member()))->wait(far());
          EXPECT_TRUE(same(at::cat(parts), whole)) << c10::toString(dtype);
        }
      }
    });
  });
}

TEST_P(EveryGroup, ScattersTheSum) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kInt, at::kComplexFloat}) {
        for (const std::int64_t length : {1, 7, 0, 30000}) {
          const std::vector<std::int64_t> shape{group.size(), length};
          const at::Tensor part = at::empty({length}, dtype);
          group.reduce_scatter(part, contribution_of(shape, dtype, group.member()))->wait(far());
          EXPECT_TRUE(same(sum(shape, dtype, group.size())[group.member()], part)) << c10::toString(dtype);
        }
      }
    });
  });
}

TEST_P(EveryGroup, BroadcastsTheTensorsOfTheRoot) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      for (int root = 0; root < group.size(); ++root) {
        std::vector<at::Tensor> tensors;
        for (const at::ScalarType dtype : kDtypes) tensors.push_back(contribution_of({3, 4}, dtype, group.member()));
        tensors.push_back(contribution_of({6, 3}, at::kFloat, group.member()).t());
        tensors.push_back(contribution_of({0}, at::kFloat, group.member()));
        tensors.push_back(contribution_of({300, 300}, at::kFloat, group.member()));
        group.broadcast(tensors, root)->wait(far());
        for (std::size_t i = 0; i < kDtypes.size(); ++i) {
          EXPECT_TRUE(same(contribution_of({3, 4}, kDtypes[i], root), tensors[i]));
        }
        EXPECT_TRUE(same(contribution_of({6, 3}, at::kFloat, root).t(), tensors[kDtypes.size()]));
        EXPECT_TRUE(same(contribution_of({300, 300}, at::kFloat, root), tensors.back()));
      }
    });
  });
}

TEST_P(EveryGroup, RunsSeveralCollectivesAtOnce) {
  world().run([](Transport& transport) {
    for_each_group(transport, [](Group& group) {
      std::vector<at::Tensor> tensors;
      std::vector<std::unique_ptr<Work>> works;
      for (int i = 0; i < 8; ++i) {
        tensors.push_back(contribution_of({100 * i + 1, 60}, at::kFloat, group.member()));
        works.push_back(group.all_reduce({tensors.back()}));
      }
      for (std::size_t i = works.size(); i-- > 0;) works[i]->wait(far());
      for (int i = 0; i < 8; ++i) {
        EXPECT_TRUE(same(sum({100 * i + 1, 60}, at::kFloat, group.size()), tensors[static_cast<std::size_t>(i)]));
      }
    });
  });
}

TEST_P(EveryGroup, KeepsTwoGroupsOfTheSameRanksApart) {
  world().run([](Transport& transport) {
    std::vector<int> all_ranks;
    for (int rank = 0; rank < transport.ranks(); ++rank) all_ranks.push_back(rank);
    const auto first_group = transport.group(all_ranks);
    const auto second_group = transport.group(all_ranks);
    const at::Tensor first = contribution_of({5}, at::kFloat, first_group->member());
    const at::Tensor second = contribution_of({9}, at::kFloat, first_group->member());
    // Members start the collectives in different orders.
    std::vector<std::unique_ptr<Work>> works;
    if (transport.rank() % 2 == 0) {
      works.push_back(first_group->all_reduce({first}));
      works.push_back(second_group->all_reduce({second}));
    } else {
      works.push_back(second_group->all_reduce({second}));
      works.push_back(first_group->all_reduce({first}));
    }
    for (const auto& work : works) work->wait(far());
    EXPECT_TRUE(same(sum({5}, at::kFloat, first_group->size()), first));
    EXPECT_TRUE(same(sum({9}, at::kFloat, first_group->size()), second));
    first_group->barrier()->wait(far());
  });
}

TEST(C10dGroup, NamesTheSizesOfTheWholeAndThePart) {
  World world(Carrier::Gloo, 2);
  world.run([](Transport& transport) {
    const auto group = transport.group({0, 1});
    expect_error<std::invalid_argument>([&] { group->all_gather(at::zeros({5}), at::zeros({2})); },
                                        "all_gather over 2 ranks: the whole is float32[5] and the part is float32[2]; "
                                        "they should be contiguous, of one "
                                        "type, and the whole as large as all parts.");
    expect_error<std::invalid_argument>(
        [&] { group->reduce_scatter(at::zeros({2}, at::kLong), at::zeros({4})); },
        "reduce_scatter over 2 ranks: the whole is float32[4] and the part is int64[2]; they should be contiguous, of "
        "one type, and the whole as large as all parts.");
    expect_error<std::invalid_argument>([&] { group->broadcast({at::zeros({2})}, 2); },
                                        "broadcast: there is no member 2 in a group of 2.");
  });
}

TEST(C10dGroup, OutlivesItsTransport) {
  std::vector<std::shared_ptr<Group>> groups(2);
  {
    World world(Carrier::Gloo, 2);
    world.run(
        [&](Transport& transport) { groups[static_cast<std::size_t>(transport.rank())] = transport.group({0, 1}); });
  }
  EXPECT_EQ(thrown_by([&] { groups[0]->barrier()->wait(far()); }), aborted("this rank has left"));
}

TEST(C10dGroup, CanBeDestroyedWithACollectiveInFlight) {
  World world(Carrier::Gloo, 2);
  const at::Tensor tensor = at::zeros({100'000});
  std::vector<std::shared_ptr<Group>> groups(2);
  world.run(
      [&](Transport& transport) { groups[static_cast<std::size_t>(transport.rank())] = transport.group({0, 1}); });
  // No member waits for the collective, and the other one never joins it.
  groups[0]->all_reduce({tensor});
  groups.clear();
}

// The connection to the member that has left is closed, and the one to the member that never joins is not.
TEST(C10dGroup, CanBeDestroyedAfterAMemberHasLeftACollectiveThatAnotherNeverJoins) {
  World world(Carrier::Gloo, 3);
  std::vector<std::shared_ptr<Group>> groups(3);
  world.run(
      [&](Transport& transport) { groups[static_cast<std::size_t>(transport.rank())] = transport.group({0, 1, 2}); });
  auto own = groups[0]->all_reduce({at::zeros({5})});
  groups[1]->all_reduce({at::zeros({5})});
  groups[1].reset();
  EXPECT_TRUE(thrown_by([&] { own->wait(soon()); }).threw);
  own.reset();
  groups[0].reset();
}

}  // namespace
}  // namespace penstock::internal::testing
