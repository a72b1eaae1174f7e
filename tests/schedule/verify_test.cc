#include "penstock/schedule/verify.h"

#include <gtest/gtest.h>

#include <functional>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "tests/schedule/expect.h"
#include "tests/thrown.h"

namespace penstock::internal::testing {
namespace {

void expect_violation(const std::string& csv, int rank, int position, const std::string& words,
                      const CsvOptions& options = {}) {
  const auto violation = verify(parse_csv(csv, options));
  ASSERT_TRUE(violation) << csv;
  EXPECT_EQ(violation->rank, rank) << violation->what;
  EXPECT_EQ(violation->position, position) << violation->what;
  EXPECT_NE(violation->what.find(words), std::string::npos) << "message: " << violation->what << "\nwanted:  " << words;
}

TEST(Verifier, AcceptsForwardsAlone) {
  EXPECT_FALSE(verify(parse_csv("0F0,0F1\n1F0,1F1\n")));
}

TEST(Verifier, FindsDuplicates) {
  expect_violation("0F0,0F0,0B0\n", 0, 1, "0F0 is a duplicate, first at schedule.csv:1:1");
  expect_violation("0F0,0B0,0B0\n", 0, 2, "0B0 is a duplicate");
  expect_violation("0F0,0I0,0W0,0B0\n", 0, 3,
                   "0B0 is a second backward: a microbatch has either B, or I and W, first at schedule.csv:1:5");
  expect_violation("0F0,0B0,0W0\n", 0, 2, "the full backward has already computed the weight gradient");
}

TEST(Verifier, FindsMissingActions) {
  expect_violation("0F0,0F1,0B0\n", 0, 3, "0B1 is missing: stage 0, microbatch 1 has no full backward");
  expect_violation("0F0,0I0\n", 0, 2, "0W0 is missing");
  expect_violation("0F0,0F2,0F3\n", 0, 3, "0F1 is missing: stage 0, microbatch 1 has no forward");
  expect_violation("0F0,0F0,0F2\n", 0, 1, "0F0 is a duplicate");
  expect_violation("0F1\n1F0,1F1\n", 0, 1, "0F0 is missing");
}

TEST(Verifier, FindsActionsBeforeTheirInputs) {
  expect_violation("0B0,0F0\n", 0, 0, "0B0 comes before its forward 0F0");
  expect_violation("0F0,0W0,0I0\n", 0, 1, "0W0 comes before its input backward 0I0");
  expect_violation("1F0,0F0\n", 0, 0, "1F0 comes before stage 0 of this rank has computed its input");
  expect_violation("0F0,1F0,0B0,1B0\n", 0, 2, "0B0 comes before stage 1 of this rank has computed its input");
}

TEST(Verifier, WantsARecomputationBetweenForwardAndBackward) {
  EXPECT_FALSE(verify(parse_csv("0F0,0F1,0R0,0B0,0I1,0W1\n")));
  EXPECT_FALSE(verify(parse_csv("0F0,0R0,0F1,0B0,0R1,0I1,0W1\n")));
  expect_violation("0R0,0F0,0B0\n", 0, 0, "0R0 comes before its forward 0F0");
  expect_violation("0F0,0B0,0R0\n", 0, 2, "0R0 comes after the backward of its microbatch");
  expect_violation("0F0,0I0,0R0,0W0\n", 0, 2, "0R0 comes after the backward of its microbatch");
  expect_violation("0F0,0R0,0R0,0B0\n", 0, 2, "0R0 is a duplicate, first at schedule.csv:1:5");
  expect_violation("0F0,0R0\n", 0, 2, "0B0 is missing: stage 0, microbatch 0 has no full backward");
}

TEST(Verifier, FindsAnOrderOfStagesThatDeadlocks) {
  const Schedule schedule = parse_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n");
  const auto violation = verify(schedule);
  ASSERT_TRUE(violation);
  EXPECT_EQ(violation->what,
            "deadlock, the ranks wait for each other in a cycle:\n"
            "  rank 0, schedule.csv:1:5: 0B0 waits for 1B0 on rank 1\n"
            "  rank 1, schedule.csv:2:1: 1F1 waits for 0F1 on rank 0");
}

TEST(Verifier, FindsADeadlockOfBlockingSends) {
  // In the second schedule, each rank sends before it posts its receives.
  const auto violation =
      verify(parse_csv("0F0,2RECV_F0,0F1,0SEND_F0,0SEND_F1,2RECV_F1,2F0,2F1\n"
                       "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1\n"));
  EXPECT_FALSE(violation) << violation->what;
  const auto stuck =
      verify(parse_csv("0F0,0F1,0SEND_F0,0SEND_F1,2RECV_F0,2RECV_F1,2F0,2F1\n"
                       "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1\n"));
  ASSERT_TRUE(stuck);
  EXPECT_EQ(stuck->what,
            "deadlock, the ranks wait for each other in a cycle (a send waits until its receive is posted):\n"
            "  rank 0, schedule.csv:1:18: 0SEND_F1 waits for 1RECV_F1 on rank 1\n"
            "  rank 1, schedule.csv:2:14: 1SEND_F0 waits for 2RECV_F0 on rank 0");
}

TEST(Verifier, MatchesSendsAndReceives) {
  expect_violation("0F0\n1RECV_F0,1F0\n", 0, 1, "0SEND_F0 is missing: its other end is 1RECV_F0 on rank 1");
  expect_violation("0F0,0SEND_F0\n1F0\n", 1, 0, "1F0 has no 1RECV_F0 before it");
  expect_violation("0SEND_F0,0F0\n1RECV_F0,1F0\n", 0, 0, "it sends a value that has not been computed yet");
  expect_violation("0F0,0SEND_F0,0SEND_F0\n1RECV_F0,1F0\n", 0, 2, "0SEND_F0 is a duplicate, first at schedule.csv:1:5");
  expect_violation("0F0,0SEND_F0\n1RECV_F0,1RECV_F0,1F0\n", 1, 1, "1RECV_F0 is a duplicate");
  expect_violation("0F0,0SEND_F0,1RECV_F0,1F0\n2F0\n", 0, 1, "stages 0 and 1 are on the same rank and need no message");
}

TEST(Verifier, KnowsEdgesOffTheChain) {
  const std::string csv = "0F0,0SEND_F0,0SEND_F0@2\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0@0,2RECV_F0,2F0\n";
  EXPECT_FALSE(verify(parse_csv(csv)));
  expect_violation("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0\n2RECV_F0,2F0\n", 2, 1, "2F0 has no 2RECV_F0@0 before it",
                   {.skips = {{0, 2}}});
  Schedule schedule(loop_placement(3, 1), 1);
  schedule.add(0, forward(0, 0));
  schedule.add(0, message(0, Computation::SendForward, 0, 2));
  const auto violation = verify(schedule, {.communication = true});
  ASSERT_TRUE(violation);
  EXPECT_NE(violation->what.find("is missing"), std::string::npos) << violation->what;
}

TEST(Verifier, ChecksSharding) {
  expect_violation("0F0,0UNSHARD,0RESHARD\n", 0, 0, "0F0 needs its stage's parameters, but stage 0 is sharded here");
  expect_violation("0UNSHARD,0UNSHARD,0F0,0RESHARD\n", 0, 1, "stage 0 is already unsharded");
  expect_violation("0UNSHARD,0F0,0RESHARD,0RESHARD\n", 0, 3, "stage 0 is already sharded");
  expect_violation("0UNSHARD,0F0\n", 0, 2, "stage 0 is unsharded and never resharded");
}

TEST(Verifier, ChecksReductions) {
  expect_violation("0F0,0F1,0B0,0REDUCE_GRAD,0B1\n", 0, 3,
                   "only 1 of stage 0's 2 weight gradients have been computed here");
  expect_violation("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", 0, 3,
                   "stage 0's gradients have already been reduced, first at schedule.csv:1:9");
  expect_violation("0F0,1F0,1B0,1REDUCE_GRAD,0B0\n", 0, 5,
                   "0REDUCE_GRAD is missing: the stage's gradients are never reduced");
}

TEST(Verifier, ChecksSumsOfSharedParameters) {
  const CsvOptions shared{.shared = {{0, 1}}};
  EXPECT_FALSE(verify(parse_csv("0F0,1F0,1B0,0B0,0SUM_SHARED\n", shared)));
  EXPECT_FALSE(verify(parse_csv("0F0,1F0,1B0,0B0,1SUM_SHARED\n", shared)));
  expect_violation("0F0,1F0,1B0,0B0,0SUM_SHARED,1SUM_SHARED\n", 0, 5, "has already joined the sum of that group",
                   shared);
  expect_violation("0F0,1F0,1B0,0SUM_SHARED,0B0\n", 0, 3, "only 0 of stage 0's 1 weight gradients", shared);
  expect_violation("0F0,1F0,1B0,0B0,1REDUCE_GRAD,0SUM_SHARED,0REDUCE_GRAD\n", 0, 5,
                   "stage 0's gradients have not been reduced yet", shared);
  expect_violation("0F0,1F0,1B0,0B0,0SUM_SHARED\n", 0, 4, "stage 0 shares no parameters");
  expect_violation("0F0,0B0,0SUM_SHARED\n1F0,1B0\n", 1, 2, "1SUM_SHARED is missing", shared);
}

TEST(Verifier, RequiresSumsWhereGradientsAreReducedAndParametersShared) {
  const std::string csv = to_csv(lower(gpipe(2, 1)));
  EXPECT_FALSE(verify(parse_csv(csv)));
  expect_violation(csv, 0, 7, "0SUM_SHARED is missing", {.shared = {{0, 1}}});
}

TEST(Verifier, FindsCollectivesInDifferentOrders) {
  const CsvOptions shared{.shared = {{0, 1}, {2, 3}}};
  const std::string first = "0F0,2F0,2B0,0B0,";
  const std::string second = "1F0,3F0,3B0,1B0,";
  EXPECT_FALSE(verify(parse_csv(first + "0SUM_SHARED,2SUM_SHARED\n" + second + "1SUM_SHARED,3SUM_SHARED\n", shared)));
  const auto violation =
      verify(parse_csv(first + "0SUM_SHARED,2SUM_SHARED\n" + second + "3SUM_SHARED,1SUM_SHARED\n", shared));
  ASSERT_TRUE(violation);
  EXPECT_NE(violation->what.find("rank 0, schedule.csv:1:17: 0SUM_SHARED waits for 1SUM_SHARED on rank 1"),
            std::string::npos)
      << violation->what;
}

TEST(Verifier, NeedsTheInputsOfBothPartsBeforeAPair) {
  // The second part depends on the first through another rank.
  expect_violation("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n", 0, 0, "wait for each other in a cycle");
  EXPECT_FALSE(verify(parse_csv("(0F0;0B0)OVERLAP_F_B\n")));
}

TEST(Verifier, SurvivesIndicesOutOfRange) {
  for (const Action& nonsense : {forward(7, 0), forward(-3, 0), forward(0, 9), forward(0, -1), forward(1, 0),
                                 parameters(99, Computation::Unshard), message(0, Computation::SendForward, 0, 77),
                                 message(0, Computation::SendForward, -5, 1), overlap(forward(0, 0), forward(5, 5))}) {
    Schedule schedule(loop_placement(2, 1), 1);
    schedule.add(0, forward(0, 0));
    schedule.add(0, nonsense);
    schedule.add(1, forward(1, 0));
    EXPECT_TRUE(verify(schedule)) << to_string(nonsense);
  }
}

TEST(Verifier, ExplainsWithPlaceRankActionAndTheMarkedTable) {
  const std::string table =
      "step  rank 0  rank 1\n"
      "0     0F0     1F0\n"
      "1     0F1     [1B1]   <-- here\n"
      "2     0B0     1F1\n"
      "3     0B1     1B0\n";
  Schedule schedule = parse_csv("0F0,0F1,0B0,0B1\n\n1F0, 1B1,1F1,1B0\n");
  expect_error([&] { require_valid(schedule); },
               "schedule.csv:3:6: rank 1, 1B1: 1B1 comes before its forward 1F1.\n\n" + table);
  // A schedule that was not read from a file has positions instead of lines and columns.
  schedule.set_source(nullptr);
  expect_error([&] { require_valid(schedule); },
               "rank 1, position 1, 1B1: 1B1 comes before its forward 1F1.\n\n" + table);
}

TEST(Verifier, ExplainsWhatIsMissingWithTheLineOfTheRank) {
  expect_error([] { require_valid(parse_csv("# Rank 1 is in line 3.\n0F0,0B0\n1F0\n")); },
               "schedule.csv:3: rank 1, at the end of its 1 actions: 1B0 is missing");
}

TEST(Verifier, GivesTheSamePlacesBeforeAndAfterLowering) {
  const Schedule stuck = parse_csv("# Stuck.\n0F0,,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", {.source = "own.csv"});
  const std::string expected = explain(stuck, *verify(stuck));
  EXPECT_NE(expected.find("own.csv:2:6: rank 0, 0B0: deadlock, the ranks wait for each other in a cycle:\n"
                          "  rank 0, own.csv:2:6: 0B0 waits for 1B0 on rank 1\n"
                          "  rank 1, own.csv:3:1: 1F1 waits for 0F1 on rank 0\n"),
            std::string::npos)
      << expected;
  EXPECT_EQ(message_of<ScheduleError>([&] { lower(stuck); }), expected);
  EXPECT_EQ(message_of<ScheduleError>([&] { lower(stuck, {.sharding = false}); }), expected);
  EXPECT_EQ(message_of<ScheduleError>([&] { add_communication(stuck); }), expected);
  EXPECT_NE(message_of<ScheduleError>([&] { simulate(stuck); }).find("rank 0 is blocked at own.csv:2:6, 0B0"),
            std::string::npos);
}

TEST(Verifier, AcceptsMoreThanAMillionActions) {
  const Schedule lowered = lower(interleaved_1f1b(16, 4, 4096));
  EXPECT_GT(lowered.size(), 1'000'000U);
  EXPECT_FALSE(verify(lowered));
}

}  // namespace
}  // namespace penstock::internal::testing
