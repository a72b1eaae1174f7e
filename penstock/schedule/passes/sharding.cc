// Which stages of a rank are gathered when: at each computation those that it and the next ones need, at most so many.
#include <algorithm>
#include <string>
#include <vector>

#include "penstock/schedule/error.h"
#include "penstock/schedule/passes.h"

namespace penstock {
namespace {

// For each action, where the same rank computes next on each of its stages: walked backwards once, so that looking ahead
// costs as much as there are stages on the rank and not as there are actions.
class LookAhead {
 public:
  LookAhead(std::span<const Action> actions, int stages) : next_of_stage_(static_cast<std::size_t>(stages), kNever) {
    uses_.resize(actions.size());
    for (std::size_t i = actions.size(); i-- > 0;) {
      if (!actions[i].is_compute()) continue;
      // The second part of a pair is used after the first.
      if (actions[i].is_overlap()) link(i, 1, actions[i].second().stage);
      link(i, 0, actions[i].stage);
    }
  }

  // The stages of this rank that are computed on from action `i` on, nearest first, at most `count` of them; but both
  // stages of a pair count as one look.
  std::vector<int> stages_from(std::size_t i, std::span<const Action> actions, std::span<const int> local, int count) {
    advance(i);
    std::vector<int> order(local.begin(), local.end());
    std::erase_if(order, [&](int stage) { return next(stage) == kNever; });
    std::sort(order.begin(), order.end(), [&](int a, int b) { return next(a) < next(b); });
    if (order.size() <= static_cast<std::size_t>(count)) return order;
    auto end = static_cast<std::size_t>(count);
    const std::size_t last_use = next(order[end - 1]) / 2;
    if (actions[last_use].is_overlap() && next(order[end]) / 2 == last_use) ++end;
    order.resize(end);
    return order;
  }

 private:
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);

  struct Uses {
    // Of the action's own stages (two in a pair): the use that comes after this one.
    std::size_t later[2] = {kNever, kNever};
    int stage[2] = {kNone, kNone};
  };

  // A use is 2 × the action's index, plus 1 for the second part of a pair.
  void link(std::size_t i, std::size_t part, int stage) {
    std::size_t& next = next_of_stage_[static_cast<std::size_t>(stage)];
    uses_[i].later[part] = next;
    uses_[i].stage[part] = stage;
    next = 2 * i + part;
  }

  // Forgets the uses before action `i`.
  void advance(std::size_t i) {
    for (; done_ < i; ++done_) {
      for (const std::size_t part : {0, 1}) {
        const int stage = uses_[done_].stage[part];
        if (stage != kNone && next(stage) == 2 * done_ + part) {
          next_of_stage_[static_cast<std::size_t>(stage)] = uses_[done_].later[part];
        }
      }
    }
  }

  std::size_t next(int stage) const { return next_of_stage_[static_cast<std::size_t>(stage)]; }

  std::vector<std::size_t> next_of_stage_;
  std::vector<Uses> uses_;
  std::size_t done_ = 0;
};

bool contains(const std::vector<int>& stages, int stage) {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

}  // namespace

Schedule add_sharding(const Schedule& schedule, int max_active_stages) {
  if (max_active_stages < 1) {
    throw ScheduleError("a rank needs at least one gathered stage to compute, not " +
                        std::to_string(max_active_stages) + ".");
  }
  Schedule result = schedule.without_actions();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    const auto local = schedule.placement().stages_of(rank);
    LookAhead ahead(actions, schedule.stages());
    std::vector<int> active;
    for (std::size_t i = 0; i < actions.size(); ++i) {
      if (actions[i].is_compute()) {
        const std::vector<int> wanted = ahead.stages_from(i, actions, local, max_active_stages);
        std::erase_if(active, [&](int stage) {
          if (contains(wanted, stage)) return false;
          result.add(rank, parameters(stage, Computation::Reshard));
          return true;
        });
        for (const int stage : wanted) {
          if (contains(active, stage)) continue;
          active.push_back(stage);
          result.add(rank, parameters(stage, Computation::Unshard));
        }
      }
      result.add(rank, actions[i]);
    }
    for (const int stage : active) result.add(rank, parameters(stage, Computation::Reshard));
  }
  return result;
}

}  // namespace penstock
