#include "penstock/schedule/simulate/network.h"

#include <map>
#include <utility>

namespace penstock::internal {

Network::Network(const Schedule& schedule, const Costs& costs, CostSampler& sampler)
    : sampler_(sampler), microbatches_(static_cast<std::size_t>(schedule.microbatches())) {
  std::map<std::pair<int, int>, std::size_t> links;
  for (const Direction direction : {Direction::Forward, Direction::Backward}) {
    const bool along_edge = direction == Direction::Forward;
    auto& channels = channels_[static_cast<std::size_t>(direction)];
    for (const Edge& edge : schedule.graph().edges()) {
      const int from = schedule.placement().rank_of(along_edge ? edge.from : edge.to);
      const int to = schedule.placement().rank_of(along_edge ? edge.to : edge.from);
      const LinkCosts& link = costs.of_link(from, to);
      const double bytes = costs.of_stage(edge.from).bytes_sent;
      channels.push_back({.receiver_rank = to,
                          .link = links.try_emplace({from, to}, links.size()).first->second,
                          .costs = link,
                          .decks = sampler.decks_of(from, to),
                          .transfer_time = link.bandwidth > 0 ? bytes / link.bandwidth : 0,
                          .crosses_ranks = from != to});
    }
    messages_[static_cast<std::size_t>(direction)].resize(channels.size() * microbatches_);
  }
  link_free_.resize(links.size(), 0);
}

}  // namespace penstock::internal
