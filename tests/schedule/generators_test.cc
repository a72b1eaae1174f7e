#include "penstock/schedule/generators.h"

#include <gtest/gtest.h>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

TEST(Generators, AreFoundByNameWithoutRegardToCase) {
  for (const Generator& generator : generators()) EXPECT_EQ(&find_generator(generator.name), &generator);
  EXPECT_EQ(find_generator("INTERLEAVED1f1b").name, "Interleaved1F1B");
}

TEST(Generators, NameTheNearestWhenThereIsNone) {
  expect_error([] { find_generator("gpip"); }, "there is no schedule 'gpip'.\n  Hint: did you mean GPipe?");
  expect_error([] { find_generator("zbv"); }, "did you mean ZBVZeroBubble?");
  expect_error([] { find_generator("nothing like it"); }, "the schedules are GPipe, 1F1B, ");
}

TEST(Generators, RefuseNumbersThatTheyCannotHave) {
  expect_error([] { generate("GPipe", {.ranks = 4, .stages_per_rank = 2, .microbatches = 4}); },
               "GPipe has one stage per rank, not 2");
  expect_error([] { generate("ZBVZeroBubble", {.ranks = 4, .stages_per_rank = 3, .microbatches = 4}); },
               "ZBVZeroBubble has two stages per rank, not 3");
  expect_error([] { generate("GPipe", {.ranks = 0, .microbatches = 4}); }, "at least one rank, not 0");
  expect_error([] { generate("GPipe", {.ranks = 1, .microbatches = 0}); }, "at least one microbatch, not 0");
  expect_error([] { generate("LoopedBFS", {.ranks = 1 << 20, .stages_per_rank = 1 << 20, .microbatches = 1 << 20}); },
               "is too large");
}

// The pictures above the generators are correct.
TEST(Generators, MakeTheirPictures) {
  EXPECT_EQ(to_csv(gpipe(3, 3)), "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n2F0,2F1,2F2,2B0,2B1,2B2\n");
  EXPECT_EQ(to_csv(one_f_one_b(3, 4)),
            "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n");
  EXPECT_EQ(to_csv(looped_bfs(2, 2, 2)), "0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0\n1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0\n");
  EXPECT_EQ(to_csv(interleaved_1f1b(2, 2, 4)),
            "0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3\n"
            "1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3\n");
  EXPECT_EQ(to_csv(forward_only(2, 2, 4)), "0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3\n1F0,1F1,3F0,3F1,1F2,1F3,3F2,3F3\n");
}

TEST(Generators, TakeTheMakespansOfThePapers) {
  Costs half;
  half.stage = {.forward = .5, .input = .5, .weight = .5};
  const auto makespan = [](const char* name, const Costs& costs) {
    return simulate(generate(name, {.ranks = 8, .microbatches = 16}), costs).makespan;
  };
  EXPECT_EQ(makespan("ZBVZeroBubble", half), 51.5);
  EXPECT_EQ(makespan("InterleavedZeroBubble", half), 51.5);
  EXPECT_EQ(makespan("Interleaved1F1B", half), 58.5);
  EXPECT_EQ(makespan("GPipe", {}), 69);
  EXPECT_EQ(makespan("1F1B", {}), 69);
}

TEST(Generators, ServeAnyPlacement) {
  const Placement unequal({0, 0, 1, 2, 2, 2, 1});
  for (const Generator& generator : generators()) {
    SCOPED_TRACE(generator.name);
    const Schedule schedule = generate(generator.name, unequal, 5);
    EXPECT_EQ(schedule.placement(), unequal);
    EXPECT_EQ(schedule.microbatches(), 5);
    require_valid(schedule);
  }
}

TEST(Generators, GiveTheirOwnScheduleOnTheirOwnPlacement) {
  EXPECT_EQ(generate("ZBVZeroBubble", v_placement(3, 2), 7), zbv_zero_bubble(3, 7));
  EXPECT_EQ(generate("1F1B", loop_placement(4, 1), 6), one_f_one_b(4, 6));
  EXPECT_EQ(generate("Interleaved1F1B", loop_placement(2, 3), 6), interleaved_1f1b(2, 3, 6));
}

}  // namespace
}  // namespace penstock::internal::testing
