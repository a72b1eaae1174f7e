// Tests of cases that torch.distributed.pipelining gets wrong or refuses in schedules. Each test is named for what
// holds here.
// tests/reference/faults.py shows that the faults are there, and tests what the command does.
#include <gtest/gtest.h>

#include <algorithm>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

TEST(TorchRegressions, EvaluationOfVSchedulesIsValid) {
  for (const char* name : {"ZBVZeroBubble", "DualPipeV"}) {
    const Schedule evaluation = drop_backwards(lower(generate(name, {.ranks = 4, .microbatches = 8})));
    EXPECT_FALSE(verify(evaluation)) << name;
    EXPECT_FALSE(features_of(evaluation).backward) << name;
  }
}

TEST(TorchRegressions, EvaluationRunsForwardsAlone) {
  const Schedule training = lower(one_f_one_b(4, 8));
  const Schedule evaluation = drop_backwards(training);
  EXPECT_EQ(simulate(evaluation).makespan, 8 + 3);
  EXPECT_EQ(features_of(evaluation), (Features{.communication = true, .sharding = true}));
}

TEST(TorchRegressions, MultiStageSchedulesHaveSkips) {
  for (const char* name : {"Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "LoopedBFS", "InterleavedZeroBubble"}) {
    const Schedule schedule = generate(name, {.ranks = 4, .microbatches = 8});
    StageGraph graph(schedule.stages());
    graph.add_edges(std::vector<Edge>{{0, 3}, {1, 6}, {0, 7}});
    EXPECT_FALSE(verify(lower(schedule.with_graph(graph)))) << name;
  }
}

TEST(TorchRegressions, ReceivesInFlightAreBounded) {
  const auto receives_at_the_start = [](int microbatches) {
    const Schedule lowered = lower(one_f_one_b(4, microbatches), {.sharding = false});
    const auto actions = lowered.actions(1);
    return std::ranges::find_if(actions, &Action::is_compute) - actions.begin();
  };
  EXPECT_EQ(receives_at_the_start(4), receives_at_the_start(64));
}

TEST(TorchRegressions, AdjacentHalvesOfABackwardAreMerged) {
  const Schedule merged = merge_backwards(zbv_zero_bubble(4, 8));
  EXPECT_LT(merged.size(), zbv_zero_bubble(4, 8).size());
  EXPECT_FALSE(verify(lower(merged)));
}

TEST(TorchRegressions, UnshardLookaheadIsConfigurable) {
  const auto most_gathered = [](int wanted) {
    const Schedule sharded = add_sharding(looped_bfs(2, 6, 4), wanted);
    int gathered = 0;
    int most = 0;
    for (const Action& action : sharded.actions(0)) {
      if (action.computation == Computation::Unshard) most = std::max(most, ++gathered);
      if (action.computation == Computation::Reshard) --gathered;
    }
    return most;
  };
  for (int wanted = 1; wanted <= 6; ++wanted) EXPECT_EQ(most_gathered(wanted), wanted);
}

TEST(TorchRegressions, LoweringTakesLargeSchedules) {
  // Time is measured in bench/; here the size, which would take PyTorch minutes.
  EXPECT_EQ(lower(interleaved_1f1b(32, 2, 2048), {.sharding = false}).size(), 2U * 64 * 2048 + 4U * 63 * 2048 + 64);
}

TEST(TorchRegressions, MessagesAreMatchedByTheirMicrobatch) {
  // The last stage takes microbatches in another order than the first; messages say which they are.
  EXPECT_FALSE(verify(lower(parse_csv("0F0,0F1,0B1,0B0\n1F1,1B1,1F0,1B0\n"))));
}

}  // namespace
}  // namespace penstock::internal::testing
