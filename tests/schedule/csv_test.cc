#include "penstock/schedule/csv.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/source.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

TEST(ScheduleCsv, ComesBackAsItWas) {
  for (const Generator& generator : generators()) {
    const Schedule schedule = generate(generator.name, {.ranks = 3, .microbatches = 7});
    EXPECT_EQ(parse_csv(to_csv(schedule)), schedule) << generator.name;
    EXPECT_EQ(parse_csv(to_csv(lower(schedule))), lower(schedule)) << generator.name;
  }
}

TEST(ScheduleCsv, CarriesEdgesOffTheChainInItsMessages) {
  StageGraph graph(4);
  graph.add_edge(0, 3);
  const Schedule lowered = lower(gpipe(4, 2).with_graph(graph));
  EXPECT_EQ(parse_csv(to_csv(lowered)), lowered);
}

TEST(ScheduleCsv, TakesGraphFromOptions) {
  const Schedule schedule = parse_csv("0F0,0B0\n1F0,1B0\n2F0,2B0\n", {.skips = {{0, 2}}, .shared = {{0, 2}}});
  EXPECT_EQ(schedule.graph().skips(), (std::vector<Edge>{{0, 2}}));
  EXPECT_EQ(schedule.graph().groups().size(), 1U);
  expect_error([] { parse_csv("0F0\n", {.skips = {{0, 2}}}); }, "there can be no edge from stage 0 to stage 2");
}

TEST(ScheduleCsv, LeavesOutIdleSlotsAndTakesEveryKindOfLine) {
  const Schedule expected = parse_csv("0F0,0B0\n1F0,1B0\n");
  for (const char* text : {",0F0,,0B0,,\r\n,,1F0,1B0\r\n",
                           "\xEF\xBB\xBF"
                           "0F0,0B0\n1F0,1B0",
                           " 0F0 , 0B0\n\t1F0,1B0\n", "\"0F0\",\"0B0\"\n1F0,1B0\n"}) {
    EXPECT_EQ(parse_csv(text), expected) << text;
  }
}

TEST(ScheduleCsv, SkipsCommentsAndBlankLines) {
  const Schedule expected = parse_csv("0F0,0B0\n1F0,1B0\n");
  for (const char* text : {"# Two ranks.\n0F0,0B0\n\n  # The second.\n1F0,1B0\n\n",
                           "\r\n0F0,0B0 # first\r\n \t\r\n1F0,1B0,#\r\n", "0F0,0B0#,0F1\n1F0,1B0"}) {
    EXPECT_EQ(parse_csv(text), expected) << text;
  }
}

TEST(ScheduleCsv, TakesALineOfCommasForARankWithoutActions) {
  const Schedule schedule = parse_csv("0F0\n,,  # rests\n1F0\n\"\"\n");
  EXPECT_EQ(schedule.ranks(), 4);
  EXPECT_EQ(schedule.placement().rank_of(1), 2);
  EXPECT_EQ(to_csv(schedule), "0F0\n,\n1F0\n,\n");
  EXPECT_EQ(parse_csv(to_csv(schedule)), schedule);
}

TEST(ScheduleCsv, NamesLineAndColumnOfABadAction) {
  expect_error([] { parse_csv("0F0,0F1\n1F0,1F1\n2F0,,,,,,2F1,2X4\n", {.source = "schedule.csv"}); },
               "schedule.csv:3:14: '2X4' is not an action: unknown computation 'X'.\n  Hint: the computations are ");
  expect_error([] { parse_csv("# Comments count as lines.\n\n0F0,  \"0X1\"\n"); }, "schedule.csv:3:8: '0X1' is not");
}

TEST(ScheduleCsv, KnowsTheLineAndColumnOfEachActionThroughEveryPass) {
  const Schedule read = parse_csv("# One rank a line.\n0F0,,  0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n", {.source = "own.csv"});
  EXPECT_EQ(place_text(read, 0, 1), "own.csv:2:8");
  EXPECT_EQ(place_text(read, 1, 3), "own.csv:4:13");
  for (const Schedule& made : {lower(read), drop_backwards(lower(read)), read.with_graph(StageGraph(2))}) {
    for (int rank = 0; rank < made.ranks(); ++rank) {
      for (std::size_t i = 0; i < made.actions(rank).size(); ++i) {
        const Action& action = made.actions(rank)[i];
        const auto given = read.actions(rank);
        const auto found = std::ranges::find(given, action);
        const std::string expected = found == given.end()
                                         ? "position " + std::to_string(i)
                                         : place_text(read, rank, static_cast<std::size_t>(found - given.begin()));
        EXPECT_EQ(place_text(made, rank, i), expected) << to_string(action);
      }
    }
  }
  // Duplicates have different locations; a part of a pair has the location of the pair.
  EXPECT_EQ(place_text(parse_csv("0F0,0F0\n"), 0, 1), "schedule.csv:1:5");
  EXPECT_EQ(place_text(drop_backwards(parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")), 0, 1), "schedule.csv:1:5");
}

TEST(ScheduleCsv, RefusesWhatIsNoSchedule) {
  expect_error([] { parse_csv(""); }, "schedule.csv: contains no action");
  expect_error([] { parse_csv("\n,,\n# 0F0\n"); }, "contains no action");
  expect_error([] { parse_csv("0F0\n0B0\n"); },
               "schedule.csv:2:1: '0B0' is in the row of rank 1, but stage 0 already has actions on rank 0");
  expect_error([] { parse_csv("0F0,2F0,0F1\n"); }, "stage 1 has no action, but stage 2 has");
  expect_error([] { parse_csv("0F0\n2147483647F2147483646\n"); },
               "schedule.csv:2:1: '2147483647F2147483646' has an index out of range: the file has only 2 actions");
  expect_error(
      [] { parse_csv("0F0,0SEND_F0@9\n"); },
      "schedule.csv:1:5: '0SEND_F0@9' is not along a possible edge: edges lead from an earlier stage to a later "
      "one, and the file has 1 stages");
  expect_error([] { parse_csv("PK\x03\x04\n"); }, "schedule.csv:1:1: 'PK");
}

TEST(ScheduleCsv, TakesManySkips) {
  std::string first = "0F0";
  std::string second;
  for (int stage = 1; stage < 20000; ++stage) {
    if (stage > 1) first.append(",0SEND_F0@").append(std::to_string(stage));
    second.append(stage > 1 ? "," : "").append(std::to_string(stage)).append("F0");
  }
  const Schedule schedule = parse_csv(first.append("\n").append(second).append("\n"));
  EXPECT_EQ(schedule.graph().skips().size(), 19998U);
  EXPECT_TRUE(verify(schedule));
}

TEST(ScheduleCsv, LoadsMoreThanAMillionActions) {
  const Schedule lowered = lower(interleaved_1f1b(16, 4, 4096));
  const Schedule loaded = parse_csv(to_csv(lowered));
  EXPECT_GT(loaded.size(), 1'000'000U);
  EXPECT_EQ(loaded, lowered);
  EXPECT_FALSE(verify(loaded));
}

}  // namespace
}  // namespace penstock::internal::testing
