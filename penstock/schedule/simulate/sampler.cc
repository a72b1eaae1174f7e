#include "penstock/schedule/simulate/sampler.h"

#include "penstock/schedule/simulate.h"

namespace penstock::internal {

CostSampler::CostSampler(int stages, const Costs& costs, const CostSamples& samples, std::uint64_t seed)
    : random_(seed) {
  for (int stage = 0; stage < stages; ++stage) stage_costs_.push_back(costs.of_stage(stage));
  for (const auto& by_computation : samples.stages) {
    auto& decks = stage_decks_.emplace_back();
    for (const auto& [computation, measured] : by_computation) decks.emplace(computation, SampleDeck(measured));
  }
  for (const auto& [ranks, link] : samples.links) {
    link_decks_.emplace(ranks, LinkDecks{.latency = SampleDeck(link.latency),
                                         .send = SampleDeck(link.send),
                                         .post = SampleDeck(link.post),
                                         .receive = SampleDeck(link.receive)});
  }
}

double CostSampler::draw_duration(const Action& action) {
  const auto stage = static_cast<std::size_t>(action.stage);
  const double if_none = duration(action.computation, stage_costs_[stage]);
  if (stage >= stage_decks_.size()) return if_none;
  const auto deck = stage_decks_[stage].find(action.computation);
  return deck == stage_decks_[stage].end() ? if_none : deck->second.draw(random_, if_none);
}

LinkDecks* CostSampler::decks_of(int from_rank, int to_rank) {
  const auto found = link_decks_.find({from_rank, to_rank});
  return found == link_decks_.end() ? nullptr : &found->second;
}

}  // namespace penstock::internal
