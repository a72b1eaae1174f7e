// Estimates the costs that the simulator needs from the records of steps.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "penstock/runtime/receives.h"
#include "penstock/runtime/record.h"

namespace penstock {

using internal::for_each_receive;
using internal::kMillisecond;
using internal::ReceivedMessage;

namespace {

double milliseconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / kMillisecond;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Times of a record, in milliseconds.
struct Measured {
  CostSamples samples;
  // Bytes of the messages with the activations of each stage.
  std::vector<std::vector<double>> bytes;
  std::vector<double> starts;
  // Times from the beginning of a send to the end of its receive, by (from rank, to rank) and bytes: see add_messages.
  std::map<std::pair<int, int>, std::map<std::int64_t, std::vector<double>>> transit;
};

constexpr std::size_t kKinds = static_cast<std::size_t>(Computation::ReduceGrad) + 1;

// Adds the parts of OVERLAP_F_B actions. The record has one time for both parts, which is divided in proportion to what
// each kind of computation takes alone.
void add_overlapped_parts(const Schedule& schedule, const Record& record, CostSamples& samples) {
  const CostSamples alone = samples;
  const auto usual = [&](const Action& part) {
    const auto& times = alone.stages[static_cast<std::size_t>(part.stage)];
    const auto found = times.find(part.computation);
    return found == times.end() ? duration(part.computation, StageCosts()) : mean(found->second);
  };
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& recorded = record.at(static_cast<std::size_t>(rank));
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      if (!actions[i].is_overlap()) continue;
      const double took = milliseconds(recorded[i].end - recorded[i].start - recorded[i].waited);
      const double both = usual(actions[i].first()) + usual(actions[i].second());
      for (const Action& part : {actions[i].first(), actions[i].second()}) {
        const double share = both > 0 ? usual(part) / both : 0.5;
        samples.stages[static_cast<std::size_t>(part.stage)][part.computation].push_back(took * share);
      }
    }
  }
}

// Adds the transit times of messages, and the times to receive one that has already arrived. The record shows the
// transit time of a message that its receiver waited for. For one that arrived before it was needed it shows only an
// upper bound: the transit is estimated as the median of the messages within that bound. Leaving such messages out
// would make slow ones look more frequent than they are.
void add_messages(const Schedule& schedule, const Record& record, Measured& measured) {
  std::map<std::pair<int, int>, std::vector<ReceivedMessage>> by_link;
  for_each_receive(schedule, record,
                   [&](const ReceivedMessage& message) { by_link[{message.from, message.to}].push_back(message); });
  for (const auto& [ends, messages] : by_link) {
    std::int64_t fastest = std::numeric_limits<std::int64_t>::max();
    for (const ReceivedMessage& message : messages) fastest = std::min(fastest, message.received - message.sent);
    const auto may_have_arrived = [&](const ReceivedMessage& message) {
      return message.awaited >= message.sent + fastest;
    };
    std::vector<double> receives;
    for (const ReceivedMessage& message : messages) {
      if (may_have_arrived(message)) receives.push_back(milliseconds(message.received - message.awaited));
    }
    // Receiving a message that has arrived is quick; a receiver that takes much longer waits for a slow one.
    const double longest_receive = 3 * median(receives);

    auto& transit = measured.transit[ends];
    std::vector<const ReceivedMessage*> arrived;
    for (const ReceivedMessage& message : messages) {
      const double receive = milliseconds(message.received - message.awaited);
      if (may_have_arrived(message) && receive <= longest_receive) {
        measured.samples.links[ends].receive.push_back(receive);
        arrived.push_back(&message);
      } else {
        transit[message.bytes].push_back(milliseconds(message.received - message.sent));
      }
    }
    const auto seen = transit;
    for (const ReceivedMessage* message : arrived) {
      const double bound = milliseconds(message->awaited - message->sent);
      std::vector<double> within;
      if (const auto found = seen.find(message->bytes); found != seen.end()) {
        std::ranges::copy_if(found->second, std::back_inserter(within), [&](double time) { return time <= bound; });
      }
      transit[message->bytes].push_back(median(std::move(within), std::min(bound, milliseconds(fastest))));
    }
  }
}

Measured measured_in(const Schedule& schedule, const Record& record) {
  Measured measured;
  CostSamples& samples = measured.samples;
  samples.stages.resize(static_cast<std::size_t>(schedule.stages()));
  measured.bytes.resize(static_cast<std::size_t>(schedule.stages()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& recorded = record.at(static_cast<std::size_t>(rank));
    measured.starts.push_back(recorded.empty() ? 0 : milliseconds(recorded.front().start));
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      const ActionRecord& action = recorded[i];
      const auto stage = static_cast<std::size_t>(actions[i].stage);
      const double took = milliseconds(action.end - action.start);
      if (static_cast<std::size_t>(actions[i].computation) < kKinds) {
        samples.stages[stage][actions[i].computation].push_back(took - milliseconds(action.waited));
      }
      if (actions[i].computation == Computation::SendForward) {
        measured.bytes[stage].push_back(static_cast<double>(action.bytes));
      }
      if (actions[i].is_send()) samples.links[{rank, action.peer}].send.push_back(took);
      if (actions[i].is_recv()) samples.links[{action.peer, rank}].post.push_back(took);
    }
  }
  add_overlapped_parts(schedule, record, samples);
  add_messages(schedule, record, measured);
  return measured;
}

// Fits latency and bandwidth of a link to the transit times of its messages.
void fit(LinkCosts& link, const std::map<std::int64_t, std::vector<double>>& by_bytes) {
  if (by_bytes.empty()) return;
  const auto& [fewest, fast] = *by_bytes.begin();
  const auto& [most, slow] = *by_bytes.rbegin();
  link.latency = std::max(0.0, median(fast));
  const double longer = median(slow) - median(fast);
  // Messages of nearly the same size tell nothing about the bandwidth, nor do large ones that are no slower.
  if (most < 2 * fewest || longer <= 0) {
    if (by_bytes.size() > 1) link.latency = std::max(link.latency, median(slow));
    return;
  }
  link.bandwidth = static_cast<double>(most - fewest) / longer;
  link.latency = std::max(0.0, link.latency - static_cast<double>(fewest) / link.bandwidth);
}

// Returns the mean of each record that has some values.
template <class Get>
std::vector<double> means_of(const std::vector<Measured>& all, const Get& get) {
  std::vector<double> means;
  for (const Measured& measured : all) {
    const std::vector<double> values = get(measured);
    if (!values.empty()) means.push_back(mean(values));
  }
  return means;
}

LinkCosts link_costs(const std::vector<Measured>& all, const std::pair<int, int>& ends) {
  const auto of = [&](std::vector<double> CostSamples::Link::* which) {
    return median(means_of(all, [&](const Measured& measured) {
      const auto found = measured.samples.links.find(ends);
      return found == measured.samples.links.end() ? std::vector<double>() : found->second.*which;
    }));
  };
  LinkCosts link;
  link.send = of(&CostSamples::Link::send);
  link.post = of(&CostSamples::Link::post);
  link.receive = of(&CostSamples::Link::receive);
  std::map<std::int64_t, std::vector<double>> transit;
  for (const Measured& measured : all) {
    const auto found = measured.transit.find(ends);
    if (found == measured.transit.end()) continue;
    for (const auto& [bytes, times] : found->second) transit[bytes].push_back(mean(times));
  }
  fit(link, transit);
  return link;
}

StageCosts stage_costs(const std::vector<Measured>& all, std::size_t stage) {
  const auto of = [&](Computation computation) {
    return means_of(all, [&](const Measured& measured) {
      const auto found = measured.samples.stages[stage].find(computation);
      return found == measured.samples.stages[stage].end() ? std::vector<double>() : found->second;
    });
  };
  // A full backward is an input and a weight backward; the record does not tell how it is divided between them.
  const double half = median(of(Computation::FullBackward)) / 2;
  StageCosts costs;
  costs.forward = median(of(Computation::Forward));
  costs.input = median(of(Computation::InputBackward), half);
  costs.weight = median(of(Computation::WeightBackward), half);
  const std::vector<double> recomputations = of(Computation::Recompute);
  if (!recomputations.empty()) costs.recompute = median(recomputations);
  costs.bytes_sent = median(means_of(all, [&](const Measured& measured) { return measured.bytes[stage]; }));
  costs.unshard = median(of(Computation::Unshard));
  costs.reshard = median(of(Computation::Reshard));
  costs.reduce = median(of(Computation::ReduceGrad));
  return costs;
}

Costs costs_of(const Schedule& schedule, const std::vector<Measured>& all) {
  Costs costs;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    costs.stages.push_back(stage_costs(all, static_cast<std::size_t>(stage)));
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<double> starts;
    for (const Measured& measured : all) starts.push_back(measured.starts[static_cast<std::size_t>(rank)]);
    costs.starts.push_back(std::max(0.0, median(std::move(starts))));
  }
  for (const Measured& measured : all) {
    for (const auto& [ends, link] : measured.samples.links) {
      if (!costs.links.contains(ends)) costs.links[ends] = link_costs(all, ends);
    }
  }
  return costs;
}

std::vector<Measured> measured_in(const Schedule& schedule, std::span<const Record> records) {
  std::vector<Measured> all;
  for (const Record& record : records) all.push_back(measured_in(schedule, record));
  return all;
}

// Returns the samples with latencies: the transit times of messages without the time for their bytes.
CostSamples with_latencies(const Measured& measured, const Costs& costs) {
  CostSamples samples = measured.samples;
  for (const auto& [ends, by_bytes] : measured.transit) {
    const double bandwidth = costs.of_link(ends.first, ends.second).bandwidth;
    for (const auto& [bytes, times] : by_bytes) {
      const double for_bytes = bandwidth > 0 ? static_cast<double>(bytes) / bandwidth : 0;
      for (const double time : times) samples.links[ends].latency.push_back(std::max(0.0, time - for_bytes));
    }
  }
  return samples;
}

}  // namespace

Costs costs_of(const Schedule& schedule, std::span<const Record> records) {
  return costs_of(schedule, measured_in(schedule, records));
}

Costs costs_of(const Schedule& schedule, const Record& record) {
  return costs_of(schedule, std::span(&record, 1));
}

Timeline simulate_records(const Schedule& schedule, std::span<const Record> records) {
  // Simulations of each record, with its times in different orders.
  constexpr std::uint64_t kSimulations = 5;
  const std::vector<Measured> all = measured_in(schedule, records);
  Costs costs = costs_of(schedule, all);
  std::vector<Timeline> simulated;
  for (const Measured& measured : all) {
    costs.starts = measured.starts;
    for (double& start : costs.starts) start = std::max(0.0, start);
    const CostSamples samples = with_latencies(measured, costs);
    for (std::uint64_t seed = 0; seed < kSimulations; ++seed) {
      simulated.push_back(simulate(schedule, costs, samples, seed));
    }
  }
  const auto middle = simulated.begin() + static_cast<std::ptrdiff_t>(simulated.size() / 2);
  std::ranges::nth_element(simulated, middle, {}, &Timeline::bubble);
  return std::move(*middle);
}

}  // namespace penstock
