#include "penstock/schedule/graph.h"

#include <gtest/gtest.h>

#include "penstock/schedule/placement.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

std::vector<int> ranks_of(const Placement& placement) {
  return {placement.ranks_by_stage().begin(), placement.ranks_by_stage().end()};
}

TEST(Placement, LoopsOverTheRanks) {
  EXPECT_EQ(ranks_of(loop_placement(3, 2)), (std::vector<int>{0, 1, 2, 0, 1, 2}));
}

TEST(Placement, GoesUpAndDownInAV) {
  EXPECT_EQ(ranks_of(v_placement(3, 2)), (std::vector<int>{0, 1, 2, 2, 1, 0}));
  EXPECT_EQ(ranks_of(v_placement(2, 3)), (std::vector<int>{0, 1, 1, 0, 0, 1}));
}

TEST(Placement, TakesUnequalNumbersOfStagesARank) {
  const Placement placement({2, 0, 2, 2});
  EXPECT_EQ(placement.ranks(), 3);
  EXPECT_EQ(placement.stages_of(1).size(), 0U);
  EXPECT_EQ(std::vector<int>(placement.stages_of(2).begin(), placement.stages_of(2).end()),
            (std::vector<int>{0, 2, 3}));
}

TEST(Placement, MapsStagesAndRanksUnderPyTorchsNames) {
  EXPECT_EQ(generate_stage_to_rank_mapping(3, 5), (std::vector<int>{0, 1, 2, 0, 1}));
  EXPECT_EQ(generate_stage_to_rank_mapping(2, 4, "v"), (std::vector<int>{0, 1, 1, 0}));
  EXPECT_EQ(generate_rank_to_stage_mapping(2, 4, "v"), (std::vector<std::vector<int>>{{0, 3}, {1, 2}}));
  EXPECT_EQ(generate_rank_to_stage_mapping(2, 3), (std::vector<std::vector<int>>{{0, 2}, {1}}));
  expect_error([] { generate_stage_to_rank_mapping(2, 5, "v"); },
               "a V placement needs a multiple of 2 stages on 2 ranks, not 5");
  expect_error([] { generate_stage_to_rank_mapping(2, 4, "ring"); }, "there is no placement 'ring'");
}

TEST(Placement, RefusesWhatIsNone) {
  expect_error([] { Placement({}); }, "at least one stage");
  expect_error([] { Placement({0, -1}); }, "stage 1 is placed on rank -1");
  expect_error([] { loop_placement(0, 1); }, "at least one rank, not 0");
  expect_error([] { v_placement(1, 0); }, "at least one stage, not 0");
}

TEST(StageGraph, IsAChainByDefault) {
  const StageGraph graph(3);
  EXPECT_EQ(std::vector<Edge>(graph.edges().begin(), graph.edges().end()), (std::vector<Edge>{{0, 1}, {1, 2}}));
  EXPECT_TRUE(graph.skips().empty());
  EXPECT_EQ(graph.edge_index(0, 2), -1);
}

TEST(StageGraph, TakesSkipsOnceAndEdgesOfTheChainForGranted) {
  StageGraph graph(4);
  graph.add_edge(0, 3);
  graph.add_edge(1, 2);
  graph.add_edge(0, 3);
  EXPECT_EQ(graph.skips(), (std::vector<Edge>{{0, 3}}));
  EXPECT_EQ(graph.in_edges(3).size(), 2U);
  EXPECT_EQ(graph.edges()[static_cast<std::size_t>(graph.edge_index(0, 3))], (Edge{0, 3}));
}

TEST(StageGraph, JoinsGroupsWithAStageInCommon) {
  StageGraph graph(6);
  graph.share({0, 5});
  graph.share({2, 1});
  graph.share({5, 3});
  ASSERT_EQ(graph.groups().size(), 2U);
  EXPECT_EQ(graph.groups()[0], (std::vector<int>{0, 3, 5}));
  EXPECT_EQ(graph.groups()[1], (std::vector<int>{1, 2}));
  EXPECT_EQ(graph.group_of(3), 0);
  EXPECT_EQ(graph.group_of(2), 1);
  EXPECT_EQ(graph.group_of(4), -1);
}

TEST(StageGraph, RefusesEdgesAndGroupsThatCannotBe) {
  StageGraph graph(4);
  expect_error([&] { graph.add_edge(2, 1); },
               "from stage 2 to stage 1: an edge leads from an earlier stage to a later");
  expect_error([&] { graph.add_edge(0, 4); }, "of the 4 stages (0 to 3)");
  expect_error([&] { graph.share({1}); }, "at least two stages");
  expect_error([&] { graph.share({1, 9}); }, "stage 9 cannot share parameters: the stages are 0 to 3");
  expect_error([] { StageGraph(0); }, "at least one stage");
}

}  // namespace
}  // namespace penstock::internal::testing
