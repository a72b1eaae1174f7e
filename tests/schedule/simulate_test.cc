#include "penstock/schedule/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"
#include "tests/schedule/expect.h"

namespace penstock::internal::testing {
namespace {

Costs with_link(double latency, double bandwidth = 0) {
  Costs costs;
  costs.link = {latency, bandwidth};
  return costs;
}

TEST(Simulator, AddsUpASmallPipelineByHand) {
  const Timeline timeline = simulate(gpipe(2, 2));
  EXPECT_EQ(timeline.makespan, 9);
  EXPECT_NEAR(timeline.bubble, 1 - 12.0 / 18, 1e-12);
  EXPECT_EQ(timeline.ranks[0].work, 6);
  EXPECT_EQ(timeline.ranks[0].fill, 0);
  EXPECT_EQ(timeline.ranks[0].waiting, (std::map<int, double>{{1, 3}}));
  EXPECT_EQ(timeline.ranks[1].fill, 1);
  EXPECT_EQ(timeline.ranks[1].drain, 2);
  const auto& spans = timeline.ranks[1].spans;
  EXPECT_EQ(spans[0].start, 1);
  EXPECT_EQ(spans[3].end, 7);
}

TEST(Simulator, CountsLatencyOnEveryHop) {
  EXPECT_EQ(simulate(gpipe(3, 1), with_link(0.25)).makespan, 9 + 4 * 0.25);
  EXPECT_EQ(simulate(lower(gpipe(3, 1)), with_link(0.25)).makespan, 9 + 4 * 0.25);
}

TEST(Simulator, LetsALinkCarryOneMessageAtATime) {
  // Two activations take three units each and are sent at 1 and 2: the second leaves at 4 and arrives at 7.
  Costs costs = with_link(0, 2);
  costs.stage.bytes_sent = 6;
  const Timeline timeline = simulate(parse_csv("0F0,0F1\n1F0,1F1\n"), costs);
  EXPECT_EQ(timeline.ranks[1].spans[0].start, 4);
  EXPECT_EQ(timeline.ranks[1].spans[1].start, 7);
}

TEST(Simulator, EndsAnActionBeforeItsSend) {
  Costs costs;
  costs.link.send = 5;
  const Timeline timeline = simulate(parse_csv("0F0,0F1\n1F0,1F1\n"), costs);
  EXPECT_EQ(timeline.ranks[0].spans[0].end, 1);
  EXPECT_EQ(timeline.ranks[0].spans[1].start, 6);
}

TEST(Simulator, MovesAMessageOnlyWhenItsReceiveIsPosted) {
  const Timeline late = simulate(parse_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n"), with_link(0.5));
  EXPECT_EQ(late.ranks[1].spans[3].start, 3);
  const Timeline early = simulate(parse_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n"), with_link(0.5));
  EXPECT_EQ(early.ranks[1].spans[3].start, 2.5);
}

TEST(Simulator, TakesCostsByStageAndByLink) {
  Costs costs;
  costs.stages = {{.forward = 2}, {.forward = 5}};
  costs.links[{0, 1}] = {.latency = 0.5};
  const Timeline timeline = simulate(parse_csv("0F0\n1F0\n2F0\n"), costs);
  EXPECT_EQ(timeline.makespan, 2 + 0.5 + 5 + 1);
}

// Each action takes a sample of its kind, and no sample is drawn twice before all others have been drawn.
TEST(Simulator, DrawsEverySampleBeforeDrawingOneAgain) {
  const Schedule schedule = parse_csv("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n");
  Costs costs;
  costs.stage.input = costs.stage.weight = 10;
  const CostSamples samples{.stages = {{{Computation::Forward, {1, 2, 4, 8}}}}, .links = {}};
  std::set<std::vector<double>> orders;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Timeline timeline = simulate(schedule, costs, samples, seed);
    // There are no samples of backwards.
    EXPECT_EQ(timeline.makespan, 1 + 2 + 4 + 8 + 4 * 20) << seed;
    std::vector<double> order;
    for (std::size_t i = 0; i < 4; ++i)
      order.push_back(timeline.ranks[0].spans[i].end - timeline.ranks[0].spans[i].start);
    orders.insert(order);
    EXPECT_EQ(simulate(schedule, costs, samples, seed).ranks[0].spans[1].end, timeline.ranks[0].spans[1].end) << seed;
  }
  EXPECT_GT(orders.size(), 5U);
}

TEST(Simulator, DrawsTheTimesOfMessages) {
  CostSamples samples;
  samples.links[{0, 1}] = {.latency = {0, 6}, .send = {0.5}, .post = {}, .receive = {}};
  const Schedule schedule = lower(parse_csv("0F0,0F1\n1F0,1F1\n"));
  std::set<double> found;
  for (std::uint64_t seed = 0; seed < 20; ++seed) found.insert(simulate(schedule, {}, samples, seed).makespan);
  // The second is late: it leaves at 2.5. The first is late: it leaves at 1, and both wait for it.
  EXPECT_EQ(found, (std::set<double>{2.5 + 6 + 1, 1 + 6 + 1 + 1}));
}

TEST(Simulator, RunsThePartsOfAPairInTurnEachReleasingAtItsOwnEnd) {
  const Schedule schedule = parse_csv("0F0,0F1,0B0,(0F2;0B1)OVERLAP_F_B,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  const Timeline timeline = simulate(schedule);
  const Span pair = timeline.ranks[0].spans[3];
  const PairSpans parts = split_pair(schedule.actions(0)[3], pair, {});
  EXPECT_EQ(parts.first.end - parts.first.start, 1);
  EXPECT_EQ(parts.second.end - parts.second.start, 2);
  // Stage 1 continues at the end of the first part, not of the pair, with and without explicit messages.
  EXPECT_EQ(timeline.ranks[1].spans[4].start, std::max(timeline.ranks[1].spans[3].end, parts.first.end));
  EXPECT_EQ(simulate(lower(schedule)).makespan, timeline.makespan);
}

TEST(Simulator, SavesActivationsFromForwardToWeightGradient) {
  Costs costs;
  costs.stage.activation_bytes = 10;
  const Timeline split = simulate(parse_csv("0F0,0I0,0F1,0I1,0W0,0W1\n"), costs);
  EXPECT_EQ(split.ranks[0].peak_activations, 2);
  EXPECT_EQ(split.ranks[0].peak_bytes, 20);
  const Timeline whole = simulate(parse_csv("0F0,0B0,0F1,0B1\n"), costs);
  EXPECT_EQ(whole.ranks[0].peak_activations, 1);
}

TEST(Simulator, BlocksInSumSharedUntilAllRanksHaveJoined) {
  const Timeline timeline = simulate(lower(gpipe(2, 1).with_graph([] {
    StageGraph graph(2);
    graph.share({0, 1});
    return graph;
  }())));
  EXPECT_EQ(timeline.ranks[1].spans.back().end, timeline.makespan);
  EXPECT_EQ(timeline.ranks[1].drain, 2);
}

// One microbatch, forward and backward: a forward takes 1, a backward 2, and a message 3 from the start of its send.
TEST(Simulator, CountsTheTimeOfRanksForMessagesAndParameters) {
  const Schedule schedule = lower(gpipe(2, 1));
  Costs costs = with_link(3, 0);
  EXPECT_EQ(simulate(schedule, costs).makespan, 1 + 3 + 3 + 3 + 2);
  // A message is transferred when its receive is posted, so a rank that starts late receives it late.
  costs.starts = {0, 8};
  EXPECT_EQ(simulate(schedule, costs).ranks[1].fill, 8 + 3);
  EXPECT_EQ(simulate(schedule, costs).makespan, 8 + 3 + 3 + 3 + 2);
  costs.starts = {};
  // The first rank gathers its parameters before its forward; the other one while it waits.
  costs.stage.unshard = 0.5;
  EXPECT_EQ(simulate(schedule, costs).makespan, 0.5 + 1 + 3 + 3 + 3 + 2);
  costs.stage.unshard = 0;
  const Schedule two = lower(gpipe(2, 2));
  const auto span_of = [&](int rank, const Action& action) {
    const auto actions = two.actions(rank);
    const auto position = std::ranges::find(actions, action) - actions.begin();
    return simulate(two, costs).ranks[static_cast<std::size_t>(rank)].spans[static_cast<std::size_t>(position)];
  };
  // The first rank posts the receive of a gradient between its forward and the send.
  costs.link.post = 0.25;
  EXPECT_EQ(span_of(1, message(1, Computation::RecvForward, 0, 0)).end, 0.25);
  EXPECT_EQ(span_of(0, message(0, Computation::SendForward, 0, 1)).start, 1 + 0.25);
  EXPECT_EQ(span_of(1, forward(1, 0)).start, 1 + 0.25 + 3);
  // The second forward's input has arrived when the first one ends; receiving it still takes time.
  costs.link.post = 0;
  costs.link.receive = 0.125;
  EXPECT_EQ(span_of(1, forward(1, 0)).start, 1 + 3);
  EXPECT_EQ(span_of(1, forward(1, 1)).start, 1 + 3 + 1 + 0.125);
  // A rank is busy while it sends, but the message is in flight from the start of the send. The last rank's forwards
  // start at 4 and 7, its backwards at 8 and 12; the first rank has finished sending at 6.
  Costs sending = with_link(3, 0);
  sending.link.send = 2;
  EXPECT_EQ(simulate(schedule, sending).makespan, 1 + 3 + 3 + 3 + 2);
  EXPECT_EQ(simulate(two, sending).ranks[0].waiting.at(1), (10 + 3 - 6) + (14 + 3 - 15));
  EXPECT_EQ(simulate(gpipe(2, 2), sending).makespan, simulate(two, sending).makespan);
}

TEST(Simulator, ReportsWhereAScheduleDeadlocks) {
  expect_error(
      [] { simulate(parse_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")); },
      "the schedule deadlocks: rank 0 is blocked at schedule.csv:1:5, 0B0.\n  Hint: verify the schedule for the cycle");
}

TEST(Simulator, AccountsForCollectivesBetweenComputations) {
  const Schedule schedule =
      parse_csv("0F0,3F0,3B0,3SUM_SHARED,0B0\n1F0,2F0,2B0,2SUM_SHARED,1B0\n", {.shared = {{2, 3}}});
  const Timeline timeline = simulate(schedule);
  EXPECT_EQ(timeline.makespan, 12);
  for (const RankTimes& times : timeline.ranks) {
    double total = times.work + times.fill + times.drain;
    for (const auto& [rank, time] : times.waiting) total += time;
    EXPECT_EQ(total, timeline.makespan);
  }
}

TEST(Simulator, SavesNothingWithoutBackwards) {
  EXPECT_EQ(simulate(forward_only(2, 2, 8)).ranks[0].peak_activations, 1);
}

TEST(Simulator, GivesARecomputationItsTime) {
  const Schedule schedule = parse_csv("0F0,0F1,0R0,0B0,0R1,0B1\n");
  EXPECT_EQ(simulate(schedule).makespan, 2 * 1 + 2 * 1 + 2 * 2);
  Costs costs;
  costs.stage.forward = 3;
  EXPECT_EQ(simulate(schedule, costs).makespan, 2 * 3 + 2 * 3 + 2 * 2);
  costs.stage.recompute = 0.5;
  EXPECT_EQ(simulate(schedule, costs).makespan, 2 * 3 + 2 * 0.5 + 2 * 2);
}

// Idle part of the longest span, with the times of a model of 1.5 B parameters on 8 ranks: row 1 of table 5 of the Zero
// Bubble paper, 1F1B.
TEST(Simulator, GivesTheLongestSpanOfThePublishedTable) {
  Costs costs = with_link(0.601);
  costs.stage.forward = 18.522;
  costs.stage.input = 18.086;
  costs.stage.weight = 9.337;
  const Timeline timeline = simulate(one_f_one_b(8, 24), costs);
  const double work = 24 * (18.522 + 18.086 + 9.337);
  EXPECT_NEAR((timeline.longest_span - work) / timeline.longest_span, 0.2431, 0.00005);
  EXPECT_LE(timeline.longest_span, timeline.makespan);
}

TEST(Simulator, RefusesCostsThatOverflow) {
  Costs costs;
  costs.stage.forward = 1e308;
  expect_error([&] { simulate(gpipe(2, 2), costs); }, "the costs are too large");
}

TEST(Costs, AreReadFromAFile) {
  const Costs costs = parse_costs(
      R"({"version": 1, "stages": [{"forward": 2, "activation_bytes": 7, "unshard": 5, "reshard": 6, "reduce": 8}, {}],
                                      "links": [{"from": 0, "to": 1, "latency": 0.5, "send": 2, "post": 3,
                                                 "receive": 4}]})",
      "costs.json", with_link(3, 4));
  EXPECT_EQ(costs.of_stage(0).forward, 2);
  EXPECT_EQ(costs.of_stage(0).activation_bytes, 7);
  EXPECT_EQ(costs.of_stage(0).input, 1);
  EXPECT_EQ(costs.of_stage(0).unshard, 5);
  EXPECT_EQ(costs.of_stage(0).reshard, 6);
  EXPECT_EQ(costs.of_stage(0).reduce, 8);
  EXPECT_EQ(costs.of_stage(5).forward, 1);
  EXPECT_EQ(costs.of_link(0, 1).latency, 0.5);
  EXPECT_EQ(costs.of_link(0, 1).bandwidth, 4);
  EXPECT_EQ(costs.of_link(0, 1).send, 2);
  EXPECT_EQ(costs.of_link(0, 1).post, 3);
  EXPECT_EQ(costs.of_link(0, 1).receive, 4);
  EXPECT_EQ(costs.of_link(1, 0).latency, 3);
}

TEST(Costs, HaveSizesAndRanksInVersionTwo) {
  const std::string text =
      R"({"version": 2, "stages": [{"recompute": 3, "activation_bytes": 7, "weight_bytes": 5, "input_bytes": 2,
                                    "parameter_bytes": 10, "gradient_bytes": 11, "optimizer_bytes": 12, "unsharded_bytes": 13,
                                    "forward_workspace": 14, "backward_workspace": 15, "update_workspace": 16,
                                    "message_bytes": 17}, {}],
          "ranks": [{"capacity": 1000, "buffer_bytes": 20, "sent_bytes": 30}]})";
  const Costs read = parse_costs(text, "costs.json");
  // Costs that were written are read back as the same.
  for (const Costs& costs : {read, parse_costs(to_json(read), "costs.json")}) {
    EXPECT_EQ(costs.stages.size(), 2U);
    EXPECT_EQ(costs.of_stage(0).recompute, 3);
    EXPECT_EQ(costs.of_stage(0).weight_bytes, 5);
    EXPECT_EQ(costs.of_stage(0).input_bytes, 2);
    EXPECT_EQ(costs.of_stage(0).parameter_bytes, 10);
    EXPECT_EQ(costs.of_stage(0).gradient_bytes, 11);
    EXPECT_EQ(costs.of_stage(0).optimizer_bytes, 12);
    EXPECT_EQ(costs.of_stage(0).unsharded_bytes, 13);
    EXPECT_EQ(costs.of_stage(0).forward_workspace, 14);
    EXPECT_EQ(costs.of_stage(0).backward_workspace, 15);
    EXPECT_EQ(costs.of_stage(0).update_workspace, 16);
    EXPECT_EQ(costs.of_stage(0).message_bytes, 17);
    EXPECT_EQ(costs.of_stage(1).recompute, std::nullopt);
    EXPECT_EQ(costs.of_stage(1).weight_bytes, std::nullopt);
    EXPECT_EQ(costs.of_rank(0).capacity, 1000);
    EXPECT_EQ(costs.of_rank(0).buffer_bytes, 20);
    EXPECT_EQ(costs.of_rank(0).sent_bytes, 30);
    EXPECT_EQ(costs.of_rank(1).capacity, 0);
  }
  expect_error([&] { require_fit(read, 2, 0); }, "the costs have 1 entries in \"ranks\", but there are 0.");
}

TEST(Costs, NameWhatIsWrongInAFile) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {std::string(200000, '['), "costs.json: is nested more than 512 deep."},
      {"{\n]", "costs.json: is not JSON: "},
      {R"({"version": 1, "stages": [{"forward": 1e999}]})", "costs.json: is not JSON: "},
      {"[]", "costs.json: the file should be an object, but is array"},
      {"{}", "costs.json: version should be 1 or 2, but is missing"},
      {R"({"version": 3})", "version should be 1 or 2, but is 3"},
      {R"({"version": 1, "ranks": []})", "the file has an unknown key 'ranks'"},
      {R"({"version": 1, "stages": [{"weight_bytes": 1}]})", "stages[0] has an unknown key 'weight_bytes'"},
      {R"({"version": 2, "ranks": [{"capacity": "2GiB"}]})", "ranks[0].capacity should be a number, but is \"2GiB\""},
      {R"({"version": 2, "stages": [{"recompute": -1}]})", "stages[0].recompute should be a non-negative number"},
      {R"({"version": 1, "stage": []})", "the file has an unknown key 'stage'.\n  Hint: did you mean stages?"},
      {R"({"version": 1, "stages": 3})", "stages should be a list, but is number"},
      {R"({"version": 1, "stages": [{}, {"foward": 1}]})",
       "stages[1] has an unknown key 'foward'.\n  Hint: did you mean forward?"},
      {R"({"version": 1, "stages": [{"forward": "x"}]})", "stages[0].forward should be a number, but is \"x\""},
      {R"({"version": 1, "stages": [{"forward": -1}]})",
       "stages[0].forward should be a non-negative number, but is -1"},
      {R"({"version": 1, "links": [{"to": 1}]})", "links[0] has no 'from', the index of a rank"},
      {R"({"version": 1, "links": [{"from": 1, "to": 1}]})", "links[0] leads from rank 1 to itself"},
      {R"({"version": 1, "links": [{"from": 1, "to": 0}, {"from": 1, "to": 0}]})",
       "links[1] names the link from rank 1 to rank 0 again"},
      {R"({"version": 1, "links": [{"from": 0.5, "to": 1}]})",
       "links[0].from should be the index of a rank, but is 0.5"},
  };
  for (const auto& entry : cases) expect_error([&] { parse_costs(entry.first, "costs.json"); }, entry.second);
}

TEST(Costs, AreTheMedianOfMeasurements) {
  EXPECT_EQ(median({3, 100, 1}), 3);
  EXPECT_EQ(median({}), 0);
  EXPECT_EQ(median({}, 7), 7);
}

TEST(Costs, MustFit) {
  Costs costs;
  costs.stages.resize(3);
  expect_error([&] { require_fit(costs, 2, 2); }, "the costs have 3 entries in \"stages\", but there are 2");
  costs.links[{0, 5}] = {};
  expect_error([&] { require_fit(costs, 3, 2); }, "a link from rank 0 to rank 5, but there are 2 ranks");
}

TEST(Costs, OfARankAreSplitOverItsStages) {
  Costs by_rank;
  by_rank.stages = {{.forward = 4, .activation_bytes = 8}, {.forward = 6}};
  const Costs costs = split_rank_costs(by_rank, Placement({0, 1, 1, 0}));
  EXPECT_EQ(costs.of_stage(3).forward, 2);
  EXPECT_EQ(costs.of_stage(3).activation_bytes, 4);
  EXPECT_EQ(costs.of_stage(1).forward, 3);
}

}  // namespace
}  // namespace penstock::internal::testing
