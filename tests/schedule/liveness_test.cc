#include "penstock/schedule/liveness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/memory.h"
#include "penstock/schedule/passes.h"
#include "penstock/schedule/simulate.h"

namespace penstock::internal::testing {
namespace {

using Kind = SavedActivations::Kind;

Costs sized_costs() {
  Costs costs;
  costs.stage.activation_bytes = 10;
  costs.stage.weight_bytes = 4;
  costs.stage.input_bytes = 1;
  return costs;
}

TEST(Liveness, SavesActivationsUntilTheInputGradientAndLessUntilTheWeightGradient) {
  const Schedule schedule = parse_csv("0F0,0F1,0I0,0B1,0W0\n");
  EXPECT_EQ(activation_liveness(schedule, 0), (std::vector<SavedActivations>{{0, 0, Kind::Activations, {0}, {2}},
                                                                             {0, 1, Kind::Activations, {1}, {3}},
                                                                             {0, 0, Kind::WeightInputs, {2}, {4}}}));
  EXPECT_EQ(peak_activations(schedule, 0), 2);
  EXPECT_EQ(peak_bytes(schedule, sized_costs(), 0), 20);
}

TEST(Liveness, SavesInputsAloneUntilTheRecomputation) {
  const Schedule schedule = parse_csv("0F0,0F1,0R0,0B0,0R1,0B1\n");
  EXPECT_EQ(activation_liveness(schedule, 0), (std::vector<SavedActivations>{{0, 0, Kind::Inputs, {0}, {2}},
                                                                             {0, 1, Kind::Inputs, {1}, {4}},
                                                                             {0, 0, Kind::Activations, {2}, {3}},
                                                                             {0, 1, Kind::Activations, {4}, {5}}}));
  EXPECT_EQ(peak_activations(schedule, 0), 1);
  EXPECT_EQ(peak_bytes(schedule, sized_costs(), 0), 10 + 1);
}

TEST(Liveness, EndsAfterTheForwardWithoutBackwards) {
  const Schedule schedule = parse_csv("0F0,0F1\n");
  EXPECT_EQ(activation_liveness(schedule, 0),
            (std::vector<SavedActivations>{{0, 0, Kind::Activations, {0}, {0}}, {0, 1, Kind::Activations, {1}, {1}}}));
  EXPECT_EQ(peak_activations(schedule, 0), 1);
}

TEST(Liveness, RunsThePartsOfAPairInTurn) {
  const Costs costs = sized_costs();
  EXPECT_EQ(peak_bytes(parse_csv("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n"), costs, 0), 10);
  EXPECT_EQ(peak_bytes(parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"), costs, 0), 20);
}

TEST(Liveness, AddsStaticBytesAndBuffers) {
  Costs costs = sized_costs();
  costs.stage.parameter_bytes = 100;
  costs.stage.gradient_bytes = 200;
  costs.stage.optimizer_bytes = 400;
  costs.rank.buffer_bytes = 1000;
  const Schedule schedule = parse_csv("0F0,1F0,1B0,0B0\n");
  EXPECT_EQ(static_bytes(schedule, costs, 0), 2 * 500 + 1000);
  const Timeline timeline = simulate(schedule, costs);
  EXPECT_EQ(timeline.ranks[0].static_bytes, 2000);
  // The gradients of a stage are allocated in its first backward: here with the activations of stage 0 alone.
  EXPECT_EQ(timeline.ranks[0].peak_bytes, 2000 + 400 + 10);
  EXPECT_EQ(memory_over_time(schedule, timeline, costs, 0),
            (std::vector<MemoryStep>{{0, 2010}, {1, 2020}, {2, 2220}, {4, 2410}, {6, 2400}}));
  EXPECT_EQ(peak_bytes(parse_csv("0F0,1F0\n"), costs, 0), 2010);
}

TEST(Liveness, AddsTemporaryMemoryWhileAComputationRuns) {
  Costs costs = sized_costs();
  costs.stage.gradient_bytes = 5;
  costs.stage.forward_workspace = 100;
  costs.stage.backward_workspace = 50;
  const Schedule schedule = parse_csv("0F0,0B0\n");
  EXPECT_EQ(memory_over_time(schedule, simulate(schedule, costs), costs, 0),
            (std::vector<MemoryStep>{{0, 110}, {1, 65}, {3, 5}}));
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 110);
  // The optimizer step follows the actions.
  costs.stage.update_workspace = 200;
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 205);
}

TEST(Liveness, CountsMessagesInSenderAndReceiver) {
  Costs costs;
  costs.stage.message_bytes = 7;
  const Schedule schedule = generate("GPipe", {.ranks = 2, .microbatches = 4});
  // Rank 1 has received all activations before its first backward, and sends their gradients. They stay until the end.
  EXPECT_EQ(static_bytes(schedule, costs, 1), 4 * 7);
  // Rank 0 has one gradient at a time; its outputs stay too.
  EXPECT_EQ(static_bytes(schedule, costs, 0), 7);
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 7 + 4 * 7);
  const Schedule lowered = lower(schedule);
  EXPECT_EQ(peak_bytes(lowered, costs, 1), 4 * 7 + 4 * 7);
  // Receives are posted ahead.
  EXPECT_GE(static_bytes(lowered, costs, 0), 7);
  costs.rank.sent_bytes = 10;
  EXPECT_EQ(peak_bytes(lowered, costs, 1), 4 * 7 + 10);
  EXPECT_EQ(peak_bytes(generate("GPipe", {.ranks = 1, .microbatches = 4}), costs, 0), 0);
}

TEST(Liveness, FreesReceivedMessagesAfterForwardsThatHaveNoBackward) {
  Costs costs;
  costs.stage.message_bytes = 7;
  const Schedule schedule = drop_backwards(generate("GPipe", {.ranks = 2, .microbatches = 4}));
  EXPECT_EQ(static_bytes(schedule, costs, 1), 7);
  EXPECT_EQ(peak_bytes(schedule, costs, 1), 7);
  // Sent messages stay until the end of the step.
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 4 * 7);
}

TEST(Liveness, KeepsAccumulatedGradientsDuringTheStep) {
  Costs costs = sized_costs();
  costs.stage.gradient_bytes = 200;
  costs.stage.accumulated_bytes = 200;
  const Schedule schedule = parse_csv("0F0,0B0\n");
  EXPECT_EQ(memory_over_time(schedule, simulate(schedule, costs), costs, 0),
            (std::vector<MemoryStep>{{0, 210}, {1, 410}, {3, 400}}));
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 410);
  // They are gone when the optimizer steps.
  costs.stage.update_workspace = 300;
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 500);
}

TEST(Liveness, GathersAndReducesShards) {
  Costs costs;
  costs.stage.unsharded_bytes = 100;
  costs.stage.gradient_bytes = 50;
  costs.stage.parameter_bytes = 50;
  const Schedule schedule = parse_csv("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n");
  Costs timed = costs;
  timed.stage.unshard = timed.stage.reshard = timed.stage.reduce = 1;
  // Shards are gathered into a flat buffer, and gradients are copied to one, which stays with their shard.
  EXPECT_EQ(memory_over_time(schedule, simulate(schedule, timed), timed, 0),
            (std::vector<MemoryStep>{{0, 250}, {1, 150}, {2, 250}, {6, 200}}));
  EXPECT_EQ(peak_bytes(schedule, costs, 0), 250);
}

TEST(Liveness, GivesMemoryOverTime) {
  const Costs costs = sized_costs();
  const Schedule schedule = parse_csv("0F0,0F1,0I0,0R1,0B1,0W0\n");
  const Timeline timeline = simulate(schedule, costs);
  EXPECT_EQ(memory_over_time(schedule, timeline, costs, 0),
            (std::vector<MemoryStep>{{0, 10}, {1, 11}, {3, 4 + 10}, {6, 4}, {7, 0}}));
}

// Follows what every microbatch of every stage has saved, action by action.
double followed_peak(const Schedule& schedule, const Costs& costs, int rank) {
  std::map<std::pair<int, int>, bool> recomputed;
  for (const Action& action : schedule.actions(rank)) {
    if (action.computation == Computation::Recompute) recomputed[{action.stage, action.microbatch}] = true;
  }
  std::map<std::pair<int, int>, double> saved;
  double peak = 0;
  for (const Action& action : schedule.actions(rank)) {
    for_each_part(action, [&](const Action& part) {
      if (!part.is_compute()) return;
      const std::pair<int, int> cell{part.stage, part.microbatch};
      if (is_forward(part)) saved[cell] = recomputed[cell] ? costs.stage.input_bytes : costs.stage.activation_bytes;
      if (part.computation == Computation::Recompute) saved[cell] = costs.stage.activation_bytes;
      double sum = 0;
      for (const auto& [key, bytes] : saved) sum += bytes;
      peak = std::max(peak, sum);
      if (part.computation == Computation::InputBackward) saved[cell] = *costs.stage.weight_bytes;
      if (makes_weight_gradient(part)) saved.erase(cell);
    });
  }
  return peak;
}

TEST(Liveness, GivesThePeakOfEverySchedule) {
  const Costs costs = sized_costs();
  for (const Generator& generator : generators()) {
    for (const int ranks : {1, 2, 4}) {
      const Schedule plain = generate(generator.name, {.ranks = ranks, .microbatches = 8});
      if (!features_of(plain).backward) continue;
      for (const Schedule& schedule : {plain, lower(plain), add_recomputation(plain, {0}),
                                       lower(add_recomputation(plain, {0, plain.stages() - 1}))}) {
        const Timeline timeline = simulate(schedule, costs);
        for (int rank = 0; rank < ranks; ++rank) {
          const double followed = followed_peak(schedule, costs, rank);
          EXPECT_EQ(peak_bytes(schedule, costs, rank), followed) << generator.name;
          double largest = 0;
          const std::vector<MemoryStep> steps = memory_over_time(schedule, timeline, costs, rank);
          for (const MemoryStep& step : steps) largest = std::max(largest, step.bytes);
          // At one moment, what one action frees and the next one allocates are one step.
          EXPECT_LE(largest, followed) << generator.name;
          EXPECT_EQ(steps.back().bytes, 0) << generator.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace penstock::internal::testing
