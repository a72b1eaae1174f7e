// Times of actions and messages in a simulation: drawn from samples where there are any, else those of the cost model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "penstock/schedule/costs.h"
#include "penstock/schedule/samples.h"

namespace penstock::internal {

// Draws samples at random without replacement; when all have been drawn, it starts again with all of them.
class SampleDeck {
 public:
  SampleDeck() = default;
  explicit SampleDeck(std::vector<double> samples) : samples_(std::move(samples)), left_(samples_.size()) {}

  double draw(std::mt19937_64& random, double if_none) {
    if (samples_.empty()) return if_none;
    if (left_ == 0) left_ = samples_.size();
    std::swap(samples_[random() % left_], samples_[left_ - 1]);
    return samples_[--left_];
  }

 private:
  std::vector<double> samples_;
  // Number of samples not drawn yet in this pass; they are at the front.
  std::size_t left_ = 0;
};

// Sample decks for the fields of LinkCosts.
struct LinkDecks {
  SampleDeck latency;
  SampleDeck send;
  SampleDeck post;
  SampleDeck receive;
};

class CostSampler {
 public:
  CostSampler(int stages, const Costs& costs, const CostSamples& samples, std::uint64_t seed);

  const StageCosts& stage_costs(int stage) const { return stage_costs_[static_cast<std::size_t>(stage)]; }

  // Draws the time of a computation, or of an operation on parameters.
  double draw_duration(const Action& action);

  // Draws one of the times of a link. `decks` are those of decks_of, or null.
  double draw(LinkDecks* decks, SampleDeck LinkDecks::* deck, double if_none) {
    return decks == nullptr ? if_none : (decks->*deck).draw(random_, if_none);
  }

  // Returns the samples of a link, or null if it has none. The pointer is valid as long as the sampler.
  LinkDecks* decks_of(int from_rank, int to_rank);

 private:
  std::vector<StageCosts> stage_costs_;
  // Decks by stage and computation; empty without samples.
  std::vector<std::map<Computation, SampleDeck>> stage_decks_;
  // Decks by (sending rank, receiving rank).
  std::map<std::pair<int, int>, LinkDecks> link_decks_;
  std::mt19937_64 random_;
};

}  // namespace penstock::internal
