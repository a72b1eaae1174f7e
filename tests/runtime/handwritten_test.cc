// Schedules as a user would write them: computations in a CSV, with any placement and any valid order.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/placement.h"
#include "penstock/schedule/schedule.h"
#include "tests/runtime/models.h"
#include "tests/tensor/values.h"

namespace penstock::internal::testing {
namespace {

struct Handwritten {
  const char* name;
  const char* csv;
};

constexpr Handwritten kHandwritten[] = {
    // Stages 0 and 3 on the first rank, 1 and 2 on the second.
    {"V",
     "0F0,0F1,,,3F0,3B0,0F2,3F1,3B1,0B0,3F2,3B2,0B1,,0B2\n"
     ",1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2B1,1B1,,2B2,1B2\n"},
    {"VOfThreeRanks",
     "0F0,0F1,0F2,5F0,5B0,5F1,5B1,5F2,5B2,0B0,0B1,0B2\n"
     "1F0,1F1,1F2,4F0,4F1,4F2,4B0,1B0,4B1,1B1,4B2,1B2\n"
     "2F0,3F0,2F1,3F1,2F2,3F2,3B0,2B0,3B1,2B1,3B2,2B2\n"},
    {"OneStageAndThree",
     "0F0,0F1,0F2,0B0,0B1,0B2\n"
     "1F0,2F0,3F0,3B0,2B0,1B0,1F1,2F1,3F1,3B1,2B1,1B1,1F2,2F2,3F2,3B2,2B2,1B2\n"},
    // The first rank has stages that are not consecutive.
    {"ThreeStagesAndOne",
     "0F0,1F0,0F1,1F1,3F0,3B0,0F2,1F2,3F1,3B1,1B0,0B0,3F2,3B2,1B1,0B1,1B2,0B2\n"
     "2F0,2F1,2B0,2F2,2B1,2B2\n"},
    // The second rank has nothing to do.
    {"OneRankIdle",
     "0F0,1F0,1B0,0F1,1F1,1B1,0B0,0B1\n"
     ",\n"
     "2F0,2B0,2F1,2B1\n"},
    {"Reordered",
     "0F0,0F2,0F1,0F3,0B3,0B0,0B2,0B1\n"
     "1F0,1F2,1F1,1F3,1B3,1B1,1B0,1B2\n"},
    // The ranks run the microbatches in different orders.
    {"ReorderedOnEachRank",
     "0F0,0F2,0F1,0F3,0B1,0B3,0B2,0B0\n"
     "1F2,1F1,1F3,1F0,1B3,1B0,1B2,1B1\n"
     "2F3,2B3,2F0,2F1,2B1,2F2,2B2,2B0\n"},
    {"SeparateWeights",
     "0F0,0F1,0F2,0F3,0I0,0I1,0I2,0I3,0W2,0W0,0W3,0W1\n"
     "1F0,1I0,1F1,1I1,1F2,1I2,1F3,1I3,1W3,1W1,1W0,1W2\n"},
    // Full and split backwards mixed, and interleaved stages of one rank.
    {"SeparateWeightsInPart",
     "0F0,0F1,2F0,2I0,0F2,2F1,2B1,0I0,2F2,2I2,0B1,0I2,2W2,0W2,2W0,0W0\n"
     "1F0,1F1,1I0,1F2,1B1,1I2,1W0,1W2\n"},
    {"Overlap",
     "0F0,0F1,3F0,(0F2;3B0)OVERLAP_F_B,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,"
     "0B2,0B3\n"
     "1F0,2F0,1F1,2F1,(1F2;2B0)OVERLAP_F_B,1B0,2F2,(1F3;2B1)OVERLAP_F_B,1B1,2F3,2B2,1B2,2B3,1B3\n"},
    {"ReductionsWithoutMessages", "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"},
    // Overlapped pairs with an input backward, or with the backward first.
    {"OverlapOfHalves",
     "0F0,0F1,3F0,(0F2;3I0)OVERLAP_F_B,3F1,(3I1;0F3)OVERLAP_F_B,3W0,(3F2;0I0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,"
     "3B3,3W1,0B2,0W0,0B3\n"
     "1F0,2F0,1F1,2F1,(1F2;2I0)OVERLAP_F_B,1I0,2F2,(2W0;1F3)OVERLAP_F_B,2B1,1B1,2F3,2B2,1B2,2B3,1B3,1W0\n"},
};

class HandwrittenSchedule : public ::testing::TestWithParam<Handwritten> {};
INSTANTIATE_TEST_SUITE_P(Threads, HandwrittenSchedule, ::testing::ValuesIn(kHandwritten),
                         [](const auto& one) { return std::string(one.param.name); });

TEST_P(HandwrittenSchedule, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  const Schedule schedule = parse_csv(GetParam().csv);
  for (const NamedModel& named : kModels) {
    expect_what_one_process_gives(named, schedule);
    if (HasFailure()) return;
  }
}

// Returns a random schedule: a random placement, and at each step any computation that may run next.
class AnySchedule {
 public:
  explicit AnySchedule(Random random) : random_(random) {}

  Schedule draw() {
    const int ranks = up_to(3);
    const int stages = up_to(5);
    const int microbatches = up_to(5);
    std::vector<int> rank_of_stage;
    for (int i = 0; i < stages; ++i) rank_of_stage.push_back(up_to(ranks) - 1);
    Schedule schedule(Placement(rank_of_stage, ranks), microbatches);
    std::vector<Cell> cells(schedule.cells());
    for (Cell& cell : cells) cell.whole = random_.percent(50);
    for (;;) {
      std::vector<Action> ready;
      for (int stage = 0; stage < stages; ++stage) {
        for (int mb = 0; mb < microbatches; ++mb) add_ready(schedule, cells, stage, mb, ready);
      }
      if (ready.empty()) return schedule;
      const Action next = random_.element_of(ready);
      schedule.add(schedule.placement().rank_of(next.stage), next);
      Cell& cell = cells[schedule.cell(next.stage, next.microbatch)];
      cell.forward = true;
      cell.input = cell.input || makes_input_gradient(next);
      cell.weight = cell.weight || makes_weight_gradient(next);
    }
  }

 private:
  // Progress of each stage and microbatch, and whether its backward is full.
  struct Cell {
    bool forward = false;
    bool input = false;
    bool weight = false;
    bool whole = false;
  };

  static void add_ready(const Schedule& schedule, const std::vector<Cell>& cells, int stage, int mb,
                        std::vector<Action>& ready) {
    const Cell& cell = cells[schedule.cell(stage, mb)];
    const bool first = stage == 0;
    const bool last = stage == schedule.stages() - 1;
    if (!cell.forward) {
      if (first || cells[schedule.cell(stage - 1, mb)].forward) ready.push_back(forward(stage, mb));
    } else if (!cell.input) {
      if (last || cells[schedule.cell(stage + 1, mb)].input) {
        ready.push_back(cell.whole ? full_backward(stage, mb) : input_backward(stage, mb));
      }
    } else if (!cell.weight) {
      ready.push_back(weight_backward(stage, mb));
    }
  }

  int up_to(int most) { return static_cast<int>(random_.between(1, most)); }

  Random random_;
};

TEST(AnyScheduleAtAll, GivesTheLossesOutputsAndGradientsOfOneProcess) {
  const std::uint64_t seed = from_environment("PENSTOCK_SEED", 1);
  const std::uint64_t cases = from_environment("PENSTOCK_CASES", 40);
  std::cout << cases << " schedules, PENSTOCK_SEED=" << seed << "\n";
  for (std::uint64_t number = 0; number < cases; ++number) {
    const Schedule schedule = AnySchedule(Random(seed, number)).draw();
    SCOPED_TRACE("schedule " + std::to_string(number) + "\n" + to_csv(schedule));
    for (const NamedModel& named : kModels) {
      expect_what_one_process_gives(named, schedule);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
