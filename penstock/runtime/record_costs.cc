// Costs out of records.
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
  // By stage: bytes of the messages with its activations.
  std::vector<std::vector<double>> bytes;
  std::vector<double> starts;
  // By (from rank, to rank) and bytes: from the beginning of a send to the end of its receive. See add_messages.
  std::map<std::pair<int, int>, std::map<std::int64_t, std::vector<double>>> transit;
};

constexpr std::size_t kKinds = static_cast<std::size_t>(Computation::ReduceGrad) + 1;

// A pair runs its parts in turn, and has one time for both: each part is taken to have as much of it as its kind takes alone.
void add_parts_of_pairs(const Schedule& schedule, const Record& record, CostSamples& samples) {
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

// Adds the transit times of messages and the times to take one that has arrived. Of a message that its receiver waited for,
// the transit is seen. Of one that was there before, only a bound is seen: it is taken to have been as fast as messages
// within that bound usually are. Leaving such messages out would make late ones look more frequent than they are.
void add_messages(const Schedule& schedule, const Record& record, Measured& measured) {
  std::map<std::pair<int, int>, std::vector<Received>> by_link;
  for_each_receive(schedule, record, [&](const Received& one) { by_link[{one.from, one.to}].push_back(one); });
  for (const auto& [ends, messages] : by_link) {
    std::int64_t fastest = std::numeric_limits<std::int64_t>::max();
    for (const Received& one : messages) fastest = std::min(fastest, one.taken - one.sent);
    const auto may_have_arrived = [&](const Received& one) { return one.asked >= one.sent + fastest; };
    std::vector<double> takes;
    for (const Received& one : messages) {
      if (may_have_arrived(one)) takes.push_back(milliseconds(one.taken - one.asked));
    }
    // Taking a message is quick; a receiver that spends much longer waits for one that is late.
    const double longest_take = 3 * median(takes);

    auto& transit = measured.transit[ends];
    std::vector<const Received*> arrived;
    for (const Received& one : messages) {
      const double take = milliseconds(one.taken - one.asked);
      if (may_have_arrived(one) && take <= longest_take) {
        measured.samples.links[ends].receive.push_back(take);
        arrived.push_back(&one);
      } else {
        transit[one.bytes].push_back(milliseconds(one.taken - one.sent));
      }
    }
    const auto seen = transit;
    for (const Received* one : arrived) {
      const double bound = milliseconds(one->asked - one->sent);
      std::vector<double> within;
      if (const auto found = seen.find(one->bytes); found != seen.end()) {
        std::ranges::copy_if(found->second, std::back_inserter(within), [&](double time) { return time <= bound; });
      }
      transit[one->bytes].push_back(median(std::move(within), std::min(bound, milliseconds(fastest))));
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
      const ActionRecord& own = recorded[i];
      const auto stage = static_cast<std::size_t>(actions[i].stage);
      const double took = milliseconds(own.end - own.start);
      if (static_cast<std::size_t>(actions[i].computation) < kKinds) {
        samples.stages[stage][actions[i].computation].push_back(took - milliseconds(own.waited));
      }
      if (actions[i].computation == Computation::SendForward) {
        measured.bytes[stage].push_back(static_cast<double>(own.bytes));
      }
      if (actions[i].is_send()) samples.links[{rank, own.peer}].send.push_back(took);
      if (actions[i].is_recv()) samples.links[{own.peer, rank}].post.push_back(took);
    }
  }
  add_parts_of_pairs(schedule, record, samples);
  add_messages(schedule, record, measured);
  return measured;
}

// Latency and bandwidth from what messages of each size took.
void fit(LinkCosts& link, const std::map<std::int64_t, std::vector<double>>& by_bytes) {
  if (by_bytes.empty()) return;
  const auto& [fewest, fast] = *by_bytes.begin();
  const auto& [most, slow] = *by_bytes.rbegin();
  link.latency = std::max(0.0, median(fast));
  const double longer = median(slow) - median(fast);
  // Sizes that are nearly the same say nothing of the bandwidth, nor do large messages that are no slower.
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
  // A full backward is an input and a weight backward; which has what part of it cannot be seen.
  const double half = median(of(Computation::FullBackward)) / 2;
  StageCosts costs;
  costs.forward = median(of(Computation::Forward));
  costs.input = median(of(Computation::InputBackward), half);
  costs.weight = median(of(Computation::WeightBackward), half);
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

// Returns the samples with latencies: what messages took without the time for their bytes.
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
  // Of each record, in different orders.
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
