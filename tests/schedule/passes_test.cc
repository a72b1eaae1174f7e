#include "penstock/schedule/passes.h"

#include <gtest/gtest.h>

#include <map>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

TEST(Evaluation, KeepsForwardsAndTheirMessages) {
  const Schedule lowered = lower(one_f_one_b(2, 2), {.sharding = false});
  EXPECT_EQ(to_csv(drop_backwards(lowered)), "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n");
  EXPECT_EQ(drop_backwards(one_f_one_b(3, 4)), forward_only(3, 1, 4));
}

TEST(Evaluation, SplitsPairsAndRemovesUnusedSharding) {
  const Schedule schedule = parse_csv("0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,0RESHARD,0UNSHARD,0B1,0RESHARD\n");
  EXPECT_EQ(to_csv(drop_backwards(schedule)), "0UNSHARD,0F0,0F1,0RESHARD\n");
}

TEST(Merging, JoinsAdjacentInputAndWeightBackwards) {
  const Schedule schedule = parse_csv("0F0,0F1,0I0,0W0,0I1\n1F0,1F1,1I0,1I1,1W0,1W1\n");
  EXPECT_EQ(to_csv(merge_backwards(schedule)), "0F0,0F1,0B0,0I1\n1F0,1F1,1I0,1I1,1W0,1W1\n");
}

TEST(Recomputation, ComesDirectlyBeforeTheBackward) {
  const Schedule schedule = parse_csv("0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n");
  EXPECT_EQ(to_csv(add_recomputation(schedule, {0})), "0F0,0F1,0R0,0B0,0R1,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n");
  // On rank 1 every backward follows its forward, so that a recomputation would free nothing.
  EXPECT_EQ(add_recomputation(schedule, {1}), schedule);
  EXPECT_EQ(add_recomputation(add_recomputation(schedule, {0, 1}), {0}), add_recomputation(schedule, {0}));
  // One that was placed earlier stays where it is.
  const Schedule early = parse_csv("0F0,0R0,0F1,0B0,0B1\n");
  EXPECT_EQ(to_csv(add_recomputation(early, {0})), "0F0,0R0,0F1,0B0,0R1,0B1\n");
  EXPECT_EQ(to_csv(drop_backwards(early)), "0F0,0F1\n");
  expect_error([&] { add_recomputation(schedule, {2}); }, "there is no stage 2 to recompute; the stages are 0 to 1.");
  expect_error([&] { add_recomputation(lower(schedule), {0}); }, "the schedule already has messages");
}

TEST(Recomputation, ComesBeforeAPair) {
  const Schedule pairs = parse_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,(1B1;0B1)OVERLAP_F_B\n");
  EXPECT_EQ(to_csv(add_recomputation(pairs, {0, 1})),
            "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0R0,(1F1;0B0)OVERLAP_F_B,0R1,(1B1;0B1)OVERLAP_F_B\n");
}

TEST(Recomputation, NeedsTheParametersOfItsStage) {
  const Schedule schedule = parse_csv("0F0,1F0,0R0,1B0,0B0\n");
  EXPECT_EQ(to_csv(add_sharding(schedule, 1)),
            "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD,0UNSHARD,0R0,0RESHARD,1UNSHARD,1B0,1RESHARD,0UNSHARD,0B0,"
            "0RESHARD\n");
}

TEST(Sharding, GathersWhatIsComputedNextAndFreesTheRest) {
  const Schedule schedule = looped_bfs(1, 3, 1);
  EXPECT_EQ(to_csv(add_sharding(schedule, 1)),
            "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD,2UNSHARD,2F0,2B0,2RESHARD,1UNSHARD,1B0,1RESHARD,0UNSHARD,0B0,"
            "0RESHARD\n");
  EXPECT_EQ(to_csv(add_sharding(schedule, 2)),
            "0UNSHARD,1UNSHARD,0F0,0RESHARD,2UNSHARD,1F0,2F0,2B0,2RESHARD,0UNSHARD,1B0,1RESHARD,0B0,0RESHARD\n");
  EXPECT_EQ(to_csv(add_sharding(schedule, 3)),
            "0UNSHARD,1UNSHARD,2UNSHARD,0F0,1F0,2F0,2B0,2RESHARD,1B0,1RESHARD,0B0,0RESHARD\n");
  expect_error([&] { add_sharding(schedule, 0); }, "max_active_stages must be at least 1, not 0");
}

TEST(Reductions, FollowTheLastWeightGradientAndSumsFollowAll) {
  const Schedule chain = parse_csv("0F0,0F1,1F0,1B0,1F1,1B1,0B0,0B1\n", {.shared = {{0, 1}}});
  EXPECT_EQ(to_csv(add_reductions(chain)), "0F0,0F1,1F0,1B0,1F1,1B1,1REDUCE_GRAD,0B0,0B1,0REDUCE_GRAD,0SUM_SHARED\n");
  EXPECT_EQ(drop_reductions(add_reductions(chain)), chain);
}

TEST(Reductions, OfAListGetTheSumsOfSharedParametersThatItLacks) {
  const Schedule given = parse_csv("0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n", {.shared = {{0, 1}}});
  const Schedule lowered = lower(given, {.sharding = false});
  EXPECT_EQ(to_csv(lowered),
            "0F0,0RECV_B0,0SEND_F0,0B0,0REDUCE_GRAD,0SUM_SHARED\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1SUM_SHARED\n");
  EXPECT_FALSE(verify(lowered));
}

TEST(Reductions, FollowAPair) {
  const Schedule schedule = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
  EXPECT_EQ(to_csv(add_reductions(schedule)), "0F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\n");
  const Schedule last = parse_csv("0F0,0F1,0B0,(0B1;1F0)OVERLAP_F_B\n");
  EXPECT_TRUE(verify(last));
  const Schedule pairs = parse_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,(1B1;0B1)OVERLAP_F_B\n");
  EXPECT_EQ(to_csv(add_reductions(pairs)),
            "0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,(1B1;0B1)OVERLAP_F_B,1REDUCE_GRAD,0REDUCE_GRAD\n");
}

TEST(Reductions, AreNotAddedWithoutBackwards) {
  const Schedule schedule = parse_csv("0F0,1F0\n", {.shared = {{0, 1}}});
  EXPECT_EQ(add_reductions(schedule), schedule);
}

TEST(Communication, IsNotAddedOnOneRank) {
  const Schedule schedule = looped_bfs(1, 3, 4);
  EXPECT_EQ(add_communication(schedule), schedule);
}

TEST(Communication, IsLocalWhereAVChangesDirection) {
  const Schedule lowered = lower(zbv_zero_bubble(2, 4));
  for (const Action& action : lowered.actions(1)) {
    if (!action.is_message()) continue;
    EXPECT_TRUE(action.stage == 1 ? action.other_stage == 0 : action.other_stage == 3) << to_string(action);
  }
}

TEST(Communication, PostsTheNextReceiveBeforeThisOneIsUsed) {
  EXPECT_EQ(
      to_csv(add_communication(gpipe(2, 4))),
      "0F0,0RECV_B0,0SEND_F0,0F1,0RECV_B1,0SEND_F1,0F2,0SEND_F2,0F3,0SEND_F3,0B0,0RECV_B2,0B1,0RECV_B3,0B2,0B3\n"
      "1RECV_F0,1RECV_F1,1F0,1RECV_F2,1F1,1RECV_F3,1F2,1F3,1B0,1SEND_B0,1B1,1SEND_B1,1B2,1SEND_B2,1B3,1SEND_B3\n");
}

// Messages of PyTorch's pipelines and of NCCL have no tags.
TEST(Communication, ReceivesInTheOrderOfSendingBetweenTwoRanks) {
  Random random = seeded(5);
  for (const Generator& generator : generators()) {
    for (int trial = 0; trial < 40; ++trial) {
      const int stages = between(random, 2, 8);
      const Placement placement = random_placement(random, between(random, 2, 4), stages);
      const Schedule lowered =
          lower(generate(generator.name, placement, between(random, 1, 9)).with_graph(random_graph(random, stages)));
      std::map<std::pair<int, int>, std::vector<Action>> sent;
      std::map<std::pair<int, int>, std::vector<Action>> received;
      for (int rank = 0; rank < lowered.ranks(); ++rank) {
        for (const Action& action : lowered.actions(rank)) {
          if (!action.is_message()) continue;
          const int other = placement.rank_of(action.other_stage);
          if (action.is_send()) sent[{rank, other}].push_back(action);
          if (action.is_recv()) received[{other, rank}].push_back(counterpart(action));
        }
      }
      ASSERT_EQ(sent, received) << generator.name << "\n" << to_csv(lowered);
    }
  }
}

TEST(Communication, IsAddedForSkipConnections) {
  StageGraph graph(3);
  graph.add_edge(0, 2);
  EXPECT_EQ(to_csv(add_communication(gpipe(3, 1).with_graph(graph))),
            "0F0,0RECV_B0,0RECV_B0@2,0SEND_F0,0SEND_F0@2,0B0\n"
            "1RECV_F0,1F0,1RECV_B0,1SEND_F0,1B0,1SEND_B0\n"
            "2RECV_F0@0,2RECV_F0,2F0,2B0,2SEND_B0@0,2SEND_B0\n");
}

TEST(Selection, KeepsTheFirstMicrobatchesAndStages) {
  EXPECT_EQ(keep_microbatches(gpipe(2, 5), 3), gpipe(2, 3));
  EXPECT_EQ(keep_microbatches(gpipe(2, 3), 9), gpipe(2, 3));
  EXPECT_EQ(to_csv(keep_microbatches(parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"), 1)), "0F0,0B0\n");
  EXPECT_EQ(keep_stages(one_f_one_b(4, 3), 4), one_f_one_b(4, 3));
  EXPECT_EQ(keep_stages(one_f_one_b(4, 3), 2).stages(), 2);
  const Schedule linked = parse_csv("0F0,1F0,2F0,3F0\n", {.skips = {{0, 2}, {1, 3}}, .shared = {{0, 2, 3}}});
  EXPECT_EQ(keep_stages(linked, 3).graph().skips(), (std::vector<Edge>{{0, 2}}));
  EXPECT_EQ(keep_stages(linked, 3).graph().groups().front(), (std::vector<int>{0, 2}));
}

TEST(Placing, KeepsTheOrderOfEachStageAndIsValid) {
  const Schedule schedule = dual_pipe_v(3, 7);
  const Schedule moved = place(schedule, Placement({0, 0, 0, 1, 1, 1}));
  require_valid(moved);
  EXPECT_EQ(moved.ranks(), 2);
  expect_error([&] { place(schedule, Placement({0, 1})); },
               "a schedule of 6 stages cannot be moved to a placement of 2");
  expect_error([&] { place(lower(schedule), Placement({0, 0, 0, 1, 1, 1})); }, "only a schedule of computations");
}

TEST(Lowering, RefusesInvalidAndLoweredSchedules) {
  expect_error([] { lower(parse_csv("0F0,0B0\n1B0,1F0\n")); },
               "schedule.csv:2:1: rank 1, 1B0: 1B0 comes before its forward 1F0");
  expect_error([] { lower(lower(gpipe(2, 2))); }, "already been lowered");
  expect_error([] { add_communication(lower(gpipe(2, 2))); }, "the schedule already has messages");
}

// Schedules that have reductions already, such as PyTorch's GPipe and 1F1B, get only messages.
TEST(Lowering, AddsWhatIsMissing) {
  const Schedule reduced = add_reductions(gpipe(2, 2));
  EXPECT_EQ(lower(reduced), lower(gpipe(2, 2)));
  EXPECT_EQ(lower(add_sharding(reduced)), lower(gpipe(2, 2)));
}

TEST(Passes, RefuseInvalidSchedules) {
  for (const char* text : {"0F0,0F0", "1F0,0F0", "0F0,0F2", "0F0,0B0,0SUM_SHARED"}) {
    const Schedule schedule = parse_csv(text);
    EXPECT_THROW(add_sharding(schedule), ScheduleError) << text;
    EXPECT_THROW(add_reductions(schedule), ScheduleError) << text;
    EXPECT_THROW(add_communication(schedule), ScheduleError) << text;
    EXPECT_THROW(simulate(schedule), ScheduleError) << text;
  }
}

// The walk that places receives also executes collectives.
TEST(Communication, DoesNotDeadlockAroundCollectives) {
  const Schedule schedule = parse_csv(
      "3F3,3F2,3F1,3F0,5F3,5F2,5F1,5F0,5I0,5W0,5I2,5W2,3B2,5I1,3B0,5I3,5W3,5W1,3I3,3W3,3I1,3W1\n"
      "\n"
      "1F3,1F2,1F1,1F0,6F3,6F2,6F1,6F0,6B0,6B1,6I2,6W2,6I3,1I0,6W3,1W0,6SUM_SHARED,1I2,1B3,1W2,1B1\n"
      "2F3,2F2,2F1,2F0,4F3,4F2,4F1,4F0,4B2,4B0,2I0,4B3,2W0,2B2,4I1,4W1,2B3,2I1,4SUM_SHARED,2W1\n"
      "0F3,0F2,0F1,0F0,0B0,0B3,0B2,0I1,0W1\n",
      {.shared = {{4, 6}}});
  require_valid(schedule);
  require_valid(add_communication(schedule));
}

TEST(Lowering, AddsOnlyWhatTheOptionsSelect) {
  const Features plain = features_of(lower(gpipe(2, 2), {.sharding = false, .reductions = false}));
  EXPECT_EQ(plain, (Features{.backward = true, .communication = true}));
}

}  // namespace
}  // namespace penstock::internal::testing
