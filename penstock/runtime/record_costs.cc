// Costs out of records.
#include <algorithm>
#include <array>
#include <cstddef>
#include <map>
#include <utility>

#include "penstock/runtime/receives.h"
#include "penstock/runtime/record.h"

namespace penstock {
namespace {

double milliseconds(std::int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / kMillisecond;
}

class Mean {
 public:
  void add(double value) {
    sum_ += value;
    ++count_;
  }
  bool empty() const { return count_ == 0; }
  double value() const { return sum_ / static_cast<double>(count_); }

 private:
  double sum_ = 0;
  std::size_t count_ = 0;
};

constexpr std::size_t kKinds = static_cast<std::size_t>(Computation::ReduceGrad) + 1;

struct LinkMeans {
  Mean send;
  Mean post;
  Mean receive;
  // By bytes: from the beginning of the send to the end of the receive.
  std::map<std::int64_t, Mean> transit;
};

// The means of one record.
struct Means {
  // By stage and computation.
  std::vector<std::array<Mean, kKinds>> actions;
  std::vector<Mean> bytes;
  std::vector<double> starts;
  std::map<std::pair<int, int>, LinkMeans> links;
};

Means means_of(const Schedule& schedule, const Record& record) {
  Means means;
  means.actions.resize(static_cast<std::size_t>(schedule.stages()));
  means.bytes.resize(static_cast<std::size_t>(schedule.stages()));
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const std::vector<ActionRecord>& recorded = record.at(static_cast<std::size_t>(rank));
    means.starts.push_back(recorded.empty() ? 0 : milliseconds(recorded.front().start));
    for (std::size_t i = 0; i < recorded.size(); ++i) {
      const ActionRecord& own = recorded[i];
      const auto stage = static_cast<std::size_t>(actions[i].stage);
      const auto kind = static_cast<std::size_t>(actions[i].computation);
      const double took = milliseconds(own.end - own.start);
      if (kind < kKinds) means.actions[stage][kind].add(took - milliseconds(own.waited));
      if (actions[i].computation == Computation::SendForward) means.bytes[stage].add(static_cast<double>(own.bytes));
      if (actions[i].is_send()) means.links[{rank, own.peer}].send.add(took);
      if (actions[i].is_recv()) means.links[{own.peer, rank}].post.add(took);
    }
  }
  // Who asks after it was sent and waits no longer than some other has found it there already.
  std::map<std::pair<int, int>, std::int64_t> least;
  for_each_receive(schedule, record, [&](const Received& one) {
    const auto [known, is_new] = least.try_emplace({one.from, one.to}, one.taken - one.sent);
    if (!is_new) known->second = std::min(known->second, one.taken - one.sent);
  });
  for_each_receive(schedule, record, [&](const Received& one) {
    LinkMeans& link = means.links[{one.from, one.to}];
    const std::int64_t fastest = least.at({one.from, one.to});
    if (one.asked <= one.sent) link.transit[one.bytes].add(milliseconds(one.taken - one.sent));
    if (one.asked >= one.sent + fastest) link.receive.add(milliseconds(one.taken - one.asked));
  });
  // A link whose receivers never waited from the beginning takes no longer than its fastest message.
  for_each_receive(schedule, record, [&](const Received& one) {
    LinkMeans& link = means.links[{one.from, one.to}];
    const std::int64_t fastest = least.at({one.from, one.to});
    if (link.transit.empty() && one.taken - one.sent == fastest) link.transit[one.bytes].add(milliseconds(fastest));
  });
  return means;
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

// One number of each record that has it.
template <class Get>
std::vector<double> values_of(const std::vector<Means>& all, const Get& get) {
  std::vector<double> values;
  for (const Means& means : all) {
    const Mean mean = get(means);
    if (!mean.empty()) values.push_back(mean.value());
  }
  return values;
}

LinkCosts link_costs(const std::vector<Means>& all, const std::pair<int, int>& ends) {
  const auto of = [&](Mean LinkMeans::* which) {
    return median(values_of(all, [&](const Means& means) {
      const auto found = means.links.find(ends);
      return found == means.links.end() ? Mean() : found->second.*which;
    }));
  };
  LinkCosts link;
  link.send = of(&LinkMeans::send);
  link.post = of(&LinkMeans::post);
  link.receive = of(&LinkMeans::receive);
  std::map<std::int64_t, std::vector<double>> transit;
  for (const Means& means : all) {
    const auto found = means.links.find(ends);
    if (found == means.links.end()) continue;
    for (const auto& [bytes, mean] : found->second.transit) transit[bytes].push_back(mean.value());
  }
  fit(link, transit);
  return link;
}

StageCosts stage_costs(const std::vector<Means>& all, std::size_t stage) {
  const auto of = [&](Computation computation) {
    return values_of(all,
                     [&](const Means& means) { return means.actions[stage][static_cast<std::size_t>(computation)]; });
  };
  // A full backward is an input and a weight backward; which has what part of it cannot be seen.
  const double half = median(of(Computation::FullBackward)) / 2;
  StageCosts costs;
  costs.forward = median(of(Computation::Forward));
  costs.input = median(of(Computation::InputBackward), half);
  costs.weight = median(of(Computation::WeightBackward), half);
  costs.bytes_sent = median(values_of(all, [&](const Means& means) { return means.bytes[stage]; }));
  costs.unshard = median(of(Computation::Unshard));
  costs.reshard = median(of(Computation::Reshard));
  costs.reduce = median(of(Computation::ReduceGrad));
  return costs;
}

}  // namespace

Costs costs_of(const Schedule& schedule, std::span<const Record> records) {
  std::vector<Means> all;
  for (const Record& record : records) all.push_back(means_of(schedule, record));
  Costs costs;
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    costs.stages.push_back(stage_costs(all, static_cast<std::size_t>(stage)));
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<double> starts;
    for (const Means& means : all) starts.push_back(means.starts[static_cast<std::size_t>(rank)]);
    costs.starts.push_back(std::max(0.0, median(std::move(starts))));
  }
  for (const Means& means : all) {
    for (const auto& [ends, link] : means.links) {
      if (!costs.links.contains(ends)) costs.links[ends] = link_costs(all, ends);
    }
  }
  return costs;
}

Costs costs_of(const Schedule& schedule, const Record& record) {
  return costs_of(schedule, std::span(&record, 1));
}

}  // namespace penstock
