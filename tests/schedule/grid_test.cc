// Generates, lowers, verifies and simulates every schedule × 1–8 ranks × 1–4 stages per rank × 1–16 microbatches: as it
// is, and with random skip connections, shared parameters and unequal placements.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"
#include "penstock/schedule/verify.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

std::vector<int> stages_per_rank_of(const Generator& generator) {
  if (generator.stages_per_rank != 0) return {generator.stages_per_rank};
  return {1, 2, 3, 4};
}

// Returns the largest number of receives of a rank that are posted and whose message has not been used yet.
int most_outstanding_receives(const Schedule& lowered) {
  int most = 0;
  for (int rank = 0; rank < lowered.ranks(); ++rank) {
    int outstanding = 0;
    for (const Action& action : lowered.actions(rank)) {
      if (action.is_recv()) most = std::max(most, ++outstanding);
      for_each_part(action, [&](const Action& part) {
        const auto count = [&](std::span<const int> edges, bool forwards) {
          for (const int e : edges) {
            const Edge& edge = lowered.graph().edges()[static_cast<std::size_t>(e)];
            const int other = forwards ? edge.from : edge.to;
            if (lowered.placement().rank_of(other) != rank) --outstanding;
          }
        };
        if (is_forward(part)) count(lowered.graph().in_edges(part.stage), true);
        if (makes_input_gradient(part)) count(lowered.graph().out_edges(part.stage), false);
      });
    }
    EXPECT_EQ(outstanding, 0);
  }
  return most;
}

class EverySchedule : public ::testing::TestWithParam<std::string> {
 protected:
  const Generator& generator() const { return find_generator(GetParam()); }

  template <class Visit>
  void for_the_grid(const Visit& visit) const {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      for (const int stages_per_rank : stages_per_rank_of(generator())) {
        for (int microbatches = 1; microbatches <= 16; ++microbatches) {
          SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(stages_per_rank) + " stages per rank, " +
                       std::to_string(microbatches) + " microbatches");
          visit(ranks, stages_per_rank, microbatches);
          if (HasFailure()) return;
        }
      }
    }
  }

  Schedule make(int ranks, int stages_per_rank, int microbatches) const {
    return generate(GetParam(), {.ranks = ranks, .stages_per_rank = stages_per_rank, .microbatches = microbatches});
  }
};

void expect_sound(const Schedule& schedule) {
  const Timeline without_messages = simulate(schedule);
  const Schedule lowered = lower(schedule);
  ASSERT_NO_THROW(require_valid(lowered));
  const Timeline timeline = simulate(lowered);
  // Messages that take no time cause no delay.
  ASSERT_EQ(timeline.makespan, without_messages.makespan);
  for (std::size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
    const RankTimes& times = timeline.ranks[rank];
    double idle = times.fill + times.drain;
    for (const auto& [other, time] : times.waiting) idle += time;
    if (times.work > 0) {
      ASSERT_NEAR(times.work + idle, timeline.makespan, 1e-9) << "rank " << rank;
    }
    ASSERT_EQ(times.peak_activations, without_messages.ranks[rank].peak_activations);
  }
  const Schedule evaluation = drop_backwards(lowered);
  ASSERT_NO_THROW(require_valid(evaluation));
  const Features features = features_of(evaluation);
  ASSERT_FALSE(features.backward || features.reduction || features.shared_sums);
  ASSERT_NO_THROW(require_valid(drop_reductions(lowered)));
}

TEST_P(EverySchedule, IsSoundOnTheWholeGrid) {
  for_the_grid([&](int ranks, int stages_per_rank, int microbatches) {
    expect_sound(make(ranks, stages_per_rank, microbatches));
  });
}

TEST_P(EverySchedule, IsSoundWithSkipsAndSharedParameters) {
  Random random = seeded(1);
  for_the_grid([&](int ranks, int stages_per_rank, int microbatches) {
    const Schedule schedule = make(ranks, stages_per_rank, microbatches);
    expect_sound(schedule.with_graph(random_graph(random, schedule.stages())));
  });
}

TEST_P(EverySchedule, IsSoundOnUnequalPlacements) {
  Random random = seeded(2);
  for_the_grid([&](int ranks, int stages_per_rank, int microbatches) {
    const int stages = std::max(1, ranks * stages_per_rank + between(random, -ranks, ranks));
    const Placement placement = random_placement(random, ranks, stages);
    expect_sound(generate(GetParam(), placement, microbatches).with_graph(random_graph(random, stages)));
  });
}

TEST_P(EverySchedule, IsNeverLongerThanWithMoreMicrobatches) {
  for_the_grid([&](int ranks, int stages_per_rank, int microbatches) {
    EXPECT_LE(simulate(make(ranks, stages_per_rank, microbatches)).makespan,
              simulate(make(ranks, stages_per_rank, microbatches + 1)).makespan);
  });
}

TEST_P(EverySchedule, MergesIntoASoundSchedule) {
  for_the_grid([&](int ranks, int stages_per_rank, int microbatches) {
    expect_sound(merge_backwards(make(ranks, stages_per_rank, microbatches)));
  });
}

TEST_P(EverySchedule, IsSoundWithRecomputation) {
  for_the_grid([&](int ranks, int stages_per_rank, int microbatches) {
    const Schedule schedule = make(ranks, stages_per_rank, microbatches);
    const Schedule recomputed = add_recomputation(schedule);
    expect_sound(recomputed);
    // With inputs of no size, a rank never holds more than the microbatch whose backward runs, and one that ran before.
    Costs costs;
    costs.stage.activation_bytes = 1;
    costs.stage.weight_bytes = 0;
    for (const RankTimes& times : simulate(recomputed, costs).ranks) {
      EXPECT_LE(times.peak_bytes, 2) << to_csv(recomputed);
    }
  });
}

// Only messages in flight may grow with the number of microbatches, as in LoopedBFS; not the receives posted ahead of
// them.
TEST_P(EverySchedule, PostsReceivesForWhatIsInFlight) {
  for (const int stages_per_rank : stages_per_rank_of(generator())) {
    const int few = most_outstanding_receives(lower(make(4, stages_per_rank, 16)));
    const int many = most_outstanding_receives(lower(make(4, stages_per_rank, 64)));
    const bool whole_batch_in_flight = GetParam() == "LoopedBFS" && stages_per_rank > 1;
    if (whole_batch_in_flight) {
      EXPECT_LE(many, 64 * 2);
    } else {
      EXPECT_EQ(few, many) << stages_per_rank << " stages per rank";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, EverySchedule, ::testing::ValuesIn([] {
                           std::vector<std::string> names;
                           for (const Generator& generator : generators()) names.emplace_back(generator.name);
                           return names;
                         }()),
                         [](const auto& parameter) { return "Of" + parameter.param; });

TEST(PeakActivations, AreAsThePapersSay) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int microbatches = 1; microbatches <= 16; ++microbatches) {
      const Timeline pipe = simulate(lower(gpipe(ranks, microbatches)));
      const Timeline alternating = simulate(lower(one_f_one_b(ranks, microbatches)));
      const Timeline v = simulate(lower(zbv_zero_bubble(ranks, microbatches)));
      for (int rank = 0; rank < ranks; ++rank) {
        const auto index = static_cast<std::size_t>(rank);
        EXPECT_EQ(pipe.ranks[index].peak_activations, microbatches);
        EXPECT_EQ(alternating.ranks[index].peak_activations, std::min(microbatches, ranks - rank));
        EXPECT_LE(v.ranks[index].peak_activations, 2 * ranks);
      }
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
