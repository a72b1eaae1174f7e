// Costs and clocks of records that are made by hand, or from a simulation whose costs have to be found again.
#include "penstock/runtime/record.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "penstock/schedule/csv.h"
#include "penstock/schedule/generators.h"
#include "penstock/schedule/passes.h"

namespace penstock::internal::testing {
namespace {

constexpr double kMillisecond = 1e6;

std::int64_t nanoseconds(double milliseconds) {
  return std::llround(milliseconds * kMillisecond);
}

// Returns the record of a run that goes as simulated: ranks are always in some action, and computations begin by
// waiting.
Record recorded(const Schedule& schedule, const Costs& costs, const Timeline& timeline) {
  Record record(static_cast<std::size_t>(schedule.ranks()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    double before = costs.start_of(rank);
    for (std::size_t i = 0; i < schedule.actions(rank).size(); ++i) {
      const Action& action = schedule.actions(rank)[i];
      const Span& span = timeline.ranks[static_cast<std::size_t>(rank)].spans[i];
      ActionRecord own{.start = nanoseconds(before), .end = nanoseconds(span.end)};
      if (action.is_compute()) own.waited = nanoseconds(span.start) - own.start;
      if (action.is_message()) own.peer = schedule.placement().rank_of(action.other_stage);
      if (action.is_send()) own.bytes = std::llround(costs.of_stage(edge_under(action).from).bytes_sent);
      record[static_cast<std::size_t>(rank)].push_back(own);
      before = span.end;
    }
  }
  return record;
}

Record recorded(const Schedule& schedule, const Costs& costs) {
  return recorded(schedule, costs, simulate(schedule, costs));
}

// Costs that differ for all stages and links, as on a machine with slow messages.
Costs uneven_costs(int stages, int ranks) {
  Costs costs;
  for (int stage = 0; stage < stages; ++stage) {
    costs.stages.push_back({.forward = 2 + 0.1 * stage,
                            .input = 3 - 0.2 * stage,
                            .weight = 3 - 0.2 * stage,
                            .bytes_sent = 4096,
                            .unshard = 0.03,
                            .reshard = 0.01,
                            .reduce = 0.02});
  }
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      if (from != to) {
        costs.links[{from, to}] = {.latency = 1.5 + 0.1 * from, .send = 0.2, .post = 0.05, .receive = 0.07};
      }
    }
    costs.starts.push_back(0.3 + 0.01 * from);
  }
  return costs;
}

// A record does not tell when the second part of an overlapped pair began.
bool has_pairs(const Schedule& schedule) {
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    if (std::ranges::any_of(schedule.actions(rank), &Action::is_overlap)) return true;
  }
  return false;
}

TEST(CostsOfARecord, LetTheSimulationRepeatWhatRan) {
  for (const Generator& generator : generators()) {
    for (const int ranks : {1, 2, 4}) {
      for (const int microbatches : {1, 4, 8}) {
        SCOPED_TRACE(std::string(generator.name) + " on " + std::to_string(ranks) + " ranks, " +
                     std::to_string(microbatches) + " microbatches");
        const Schedule schedule = lower(generate(generator.name, {.ranks = ranks, .microbatches = microbatches}));
        if (has_pairs(schedule)) continue;
        const Costs costs = uneven_costs(schedule.stages(), ranks);
        const Timeline expected = simulate(schedule, costs);
        const Timeline found = simulate(schedule, costs_of(schedule, recorded(schedule, costs)));
        EXPECT_NEAR(found.makespan, expected.makespan, 0.02 * expected.makespan);
        EXPECT_NEAR(found.bubble, expected.bubble, 0.02);
      }
    }
  }
}

// Without the time of messages, the simulation of this run would have less than half of its bubble.
TEST(CostsOfARecord, HaveTheTimeOfMessages) {
  const Schedule schedule = lower(generate("1F1B", {.ranks = 2, .microbatches = 4}));
  const Costs costs = uneven_costs(2, 2);
  Costs found = costs_of(schedule, recorded(schedule, costs));
  EXPECT_NEAR(found.of_link(0, 1).latency, 1.5, 0.01);
  EXPECT_NEAR(found.of_link(1, 0).latency, 1.6, 0.01);
  EXPECT_NEAR(found.of_link(0, 1).send, 0.2, 1e-5);
  EXPECT_NEAR(found.of_link(0, 1).post, 0.05, 1e-5);
  EXPECT_NEAR(found.start_of(1), 0.31, 1e-5);
  EXPECT_NEAR(found.of_stage(1).forward, 2.1, 1e-5);
  EXPECT_NEAR(found.of_stage(0).unshard, 0.03, 1e-5);
  const double bubble = simulate(schedule, costs).bubble;
  EXPECT_NEAR(simulate(schedule, found).bubble, bubble, 0.01);
  found.links.clear();
  found.starts.clear();
  EXPECT_LT(simulate(schedule, found).bubble, 0.7 * bubble);
}

// Two edges over one link: 1000 bytes take 1 ms, and 5000 take 3 ms.
TEST(CostsOfARecord, TellLatencyFromBandwidthWhereSizesDiffer) {
  const Schedule chain = parse_csv("0F0,0SEND_F0,2RECV_F0,2F0,2SEND_F0\n1RECV_F0,3RECV_F0,1F0,1SEND_F0,3F0\n");
  const auto at = [](double start, double end, double waited = 0, std::int64_t bytes = 0, int peer = -1) {
    return ActionRecord{.start = nanoseconds(start),
                        .end = nanoseconds(end),
                        .waited = nanoseconds(waited),
                        .bytes = bytes,
                        .peer = peer};
  };
  const Record record = {{at(0, 1), at(1, 1, 0, 1000, 1), at(1, 1, 0, 0, 1), at(1, 5, 3), at(5, 5, 0, 5000, 1)},
                         {at(0, 0, 0, 0, 0), at(0, 0, 0, 0, 0), at(0, 3, 2), at(3, 3, 0, 1000, 0), at(3, 9, 5)}};
  const Costs costs = costs_of(chain, record);
  EXPECT_NEAR(costs.of_link(0, 1).bandwidth, 4000 / 2.0, 1e-6);
  EXPECT_NEAR(costs.of_link(0, 1).latency, 0.5, 1e-6);
  // For messages of one size, all time is latency.
  EXPECT_EQ(costs.of_link(1, 0).bandwidth, 0);
  EXPECT_NEAR(costs.of_link(1, 0).latency, 1, 1e-6);
}

TEST(CostsOfARecord, AreTheMedianOfSeveral) {
  const Schedule schedule = lower(generate("GPipe", {.ranks = 2, .microbatches = 3}));
  std::vector<Record> records;
  for (const double forward : {2.0, 9.0, 3.0}) {
    Costs costs = uneven_costs(2, 2);
    costs.stages[0].forward = forward;
    records.push_back(recorded(schedule, costs));
  }
  EXPECT_NEAR(costs_of(schedule, records).of_stage(0).forward, 3, 1e-5);
}

TEST(CostsOfARecord, AreThoseOfTheRanksThatItHas) {
  const Schedule schedule = lower(generate("1F1B", {.ranks = 2, .microbatches = 4}));
  Record record = recorded(schedule, uneven_costs(2, 2));
  record[1].clear();
  const Costs costs = costs_of(schedule, record);
  EXPECT_NEAR(costs.of_stage(0).forward, 2, 1e-5);
  EXPECT_EQ(costs.of_stage(1).forward, 0);
}

// Steps in which one message in eight is slow: the mean latency hides most of the cost.
TEST(SimulatedRecords, HaveTheBubbleOfOccasionallySlowMessages) {
  for (const char* name : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}) {
    SCOPED_TRACE(name);
    const Schedule schedule = lower(generate(name, {.ranks = 2, .microbatches = 8}));
    Costs costs = uneven_costs(schedule.stages(), 2);
    for (auto& [ends, link] : costs.links) link.latency = 0.01;
    CostSamples samples;
    for (const auto& [ends, link] : costs.links) {
      samples.links[ends].latency = {0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01, 12};
    }
    std::vector<Record> records;
    std::vector<double> bubbles;
    for (std::uint64_t seed = 1000; seed < 1041; ++seed) {
      const Timeline ran = simulate(schedule, costs, samples, seed);
      records.push_back(recorded(schedule, costs, ran));
      bubbles.push_back(ran.bubble);
    }
    std::ranges::sort(bubbles);
    const double median = bubbles[bubbles.size() / 2];
    EXPECT_NEAR(simulate_records(schedule, records).bubble, median, 0.1 * median);
    EXPECT_LT(simulate(schedule, costs).bubble, 0.8 * median);
  }
}

TEST(SimulatedRecords, AreTheStepItselfWhereTimesDoNotVary) {
  for (const Generator& generator : generators()) {
    SCOPED_TRACE(std::string(generator.name));
    const Schedule schedule = lower(generate(generator.name, {.ranks = 2, .microbatches = 4}));
    if (has_pairs(schedule)) continue;
    const Costs costs = uneven_costs(schedule.stages(), 2);
    const Timeline expected = simulate(schedule, costs);
    const Record record = recorded(schedule, costs, expected);
    const Timeline found = simulate_records(schedule, std::span(&record, 1));
    EXPECT_NEAR(found.makespan, expected.makespan, 0.02 * expected.makespan);
    EXPECT_NEAR(found.bubble, expected.bubble, 0.02);
  }
}

TEST(CommonClock, RemovesTheDifferencesBetweenClocks) {
  for (const char* name : {"1F1B", "GPipe", "Interleaved1F1B"}) {
    const Schedule schedule = lower(generate(name, {.ranks = 3, .microbatches = 6}));
    Costs costs = uneven_costs(schedule.stages(), 3);
    for (auto& [ends, link] : costs.links) link.latency = 1.5;
    costs.starts.clear();
    Record expected = recorded(schedule, costs);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      for (std::size_t i = 0; i < expected[rank].size(); ++i) {
        if (!schedule.actions(static_cast<int>(rank))[i].is_message()) continue;
        expected[rank][i].transfer_start = expected[rank][i].start + 10;
        expected[rank][i].transfer_end = expected[rank][i].end + 20;
      }
    }
    Record shifted = expected;
    const std::vector<std::int64_t> ahead = {0, nanoseconds(-40), nanoseconds(1000)};
    for (std::size_t rank = 0; rank < 3; ++rank) {
      for (ActionRecord& own : shifted[rank]) {
        own.start += ahead[rank];
        own.end += ahead[rank];
        if (!own.has_transfer()) continue;
        own.transfer_start += ahead[rank];
        own.transfer_end += ahead[rank];
      }
    }
    const Record found = with_common_clock(schedule, shifted);
    // The rank whose clock was furthest ahead appears to have begun first.
    const std::int64_t zero = found[0][0].start - expected[0][0].start;
    EXPECT_EQ(zero, nanoseconds(1000));
    for (std::size_t rank = 0; rank < 3; ++rank) {
      for (std::size_t i = 0; i < found[rank].size(); ++i) {
        EXPECT_NEAR(static_cast<double>(found[rank][i].start - zero), static_cast<double>(expected[rank][i].start), 2)
            << name << ", rank " << rank << ", action " << i;
        EXPECT_EQ(found[rank][i].has_transfer(), expected[rank][i].has_transfer());
        if (!found[rank][i].has_transfer()) continue;
        EXPECT_EQ(found[rank][i].transfer_start - found[rank][i].start, 10);
        EXPECT_EQ(found[rank][i].transfer_end - found[rank][i].end, 20);
      }
    }
    EXPECT_NEAR(timeline_of(schedule, found).makespan - 1000, timeline_of(schedule, expected).makespan, 1e-3);
  }
}

// A device backend begins to receive when the receive is posted, long before there is something to receive.
TEST(RecordedTransfers, AreDrawnFromWhenTheirSenderHasBegun) {
  const Schedule schedule = parse_csv("0F0,0SEND_F0\n1RECV_F0,1F0\n");
  const auto timeline_with = [&](const ActionRecord& send, const ActionRecord& receive) {
    const ActionRecord forward{.start = nanoseconds(0), .end = nanoseconds(1)};
    return timeline_of(schedule, {{forward, send}, {receive, forward}});
  };
  const auto transferred = [](double start, double end, int peer) {
    return ActionRecord{
        .bytes = 64, .peer = peer, .transfer_start = nanoseconds(start), .transfer_end = nanoseconds(end)};
  };
  const Timeline direct = timeline_with(transferred(2, 4, 1), transferred(1, 5, 0));
  ASSERT_EQ(direct.ranks[0].transfers.size(), 1U);
  ASSERT_EQ(direct.ranks[1].transfers.size(), 1U);
  const Transfer& sent = direct.ranks[0].transfers[0];
  EXPECT_EQ(sent.action, 1U);
  EXPECT_EQ(sent.peer, 1);
  EXPECT_EQ(sent.bytes, 64);
  EXPECT_EQ(sent.span.start, 2);
  EXPECT_EQ(sent.span.end, 4);
  const Transfer& received = direct.ranks[1].transfers[0];
  EXPECT_EQ(received.action, 0U);
  EXPECT_EQ(received.peer, 0);
  EXPECT_EQ(received.span.start, 2);
  EXPECT_EQ(received.span.end, 5);
  // A copy to the device begins later, and one whose sender did not copy is all that was measured.
  EXPECT_EQ(timeline_with(transferred(2, 4, 1), transferred(6, 7, 0)).ranks[1].transfers[0].span.start, 6);
  EXPECT_EQ(timeline_with({.peer = 1}, transferred(6, 7, 0)).ranks[1].transfers[0].span.start, 6);
  // Clocks of ranks that differ do not make it end before it begins.
  EXPECT_EQ(timeline_with(transferred(8, 9, 1), transferred(6, 7, 0)).ranks[1].transfers[0].span.start, 7);
  EXPECT_TRUE(timeline_with({.peer = 1}, {.peer = 0}).ranks[1].transfers.empty());
}

TEST(CommonClock, LeavesRanksAloneThatOnlySend) {
  const Schedule schedule = lower(forward_only(2, 1, 2));
  const Record record = recorded(schedule, uneven_costs(2, 2));
  const Record found = with_common_clock(schedule, record);
  EXPECT_EQ(found[0][0].start, record[0][0].start);
  EXPECT_EQ(found[1].back().end, record[1].back().end);
}

}  // namespace
}  // namespace penstock::internal::testing
