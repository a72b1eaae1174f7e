// Which stages of a rank are gathered when: at each computation those that it and the next ones need, at most so many.
#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/error.h"
#include "penstock/schedule/passes/unchecked.h"

namespace penstock {
namespace {

// The stages of a rank in the order in which it computes on them next, followed from action to action. Each action knows
// where its stages are used next, so that a step costs a place in that order and no look at the list.
class LookAhead {
 public:
  // No next use.
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);

  // `next` has a place for each stage, with kNever for those of this rank: ranks share it, as no stage is on two of them.
  LookAhead(std::span<const Action> actions, std::span<const int> local, std::vector<std::size_t>& next)
      : actions_(actions), uses_(actions.size()) {
    const auto link = [&](std::size_t i, std::size_t part, int stage) {
      uses_[i][part] = std::exchange(next[static_cast<std::size_t>(stage)], 2 * i + part);
    };
    for (std::size_t i = actions.size(); i-- > 0;) {
      if (!actions[i].is_compute()) continue;
      if (actions[i].is_overlap()) link(i, 1, actions[i].other_stage);
      link(i, 0, actions[i].stage);
    }
    for (const int stage : local) {
      if (next[static_cast<std::size_t>(stage)] != kNever)
        order_.push_back({next[static_cast<std::size_t>(stage)], stage});
    }
    std::sort(order_.begin(), order_.end());
  }

  // How many of the next stages may be gathered: `most`, but both of a pair if either.
  std::size_t window(int most) const {
    const auto size = static_cast<std::size_t>(most);
    if (order_.size() <= size) return order_.size();
    const std::size_t last = order_[size - 1].use / 2;
    return size + (actions_[last].is_overlap() && order_[size].use / 2 == last ? 1 : 0);
  }
  int stage(std::size_t place) const { return order_[place].stage; }

  // Leaves the action behind that comes next. Whether window(most) holds other stages than before.
  bool advance(int most) {
    const std::size_t before = window(most);
    const std::size_t action = order_.front().use / 2;
    bool left = false;
    while (!order_.empty() && order_.front().use / 2 == action) left |= move_front_back() >= before;
    return left || window(most) != before;
  }

 private:
  // A use is 2 × the action's index, plus 1 for the second part of a pair.
  struct NextUse {
    std::size_t use;
    int stage;
    auto operator<=>(const NextUse&) const = default;
  };

  // Puts the front stage where its next use belongs, and tells where that is.
  std::size_t move_front_back() {
    const NextUse moved{uses_[order_.front().use / 2][order_.front().use % 2], order_.front().stage};
    if (moved.use == kNever) {
      order_.erase(order_.begin());
      return kNever;
    }
    std::size_t place = 0;
    for (; place + 1 < order_.size() && order_[place + 1].use < moved.use; ++place) order_[place] = order_[place + 1];
    order_[place] = moved;
    return place;
  }

  std::span<const Action> actions_;
  // By action and part of a pair: the next use of the same stage.
  std::vector<std::array<std::size_t, 2>> uses_;
  std::vector<NextUse> order_;
};

bool contains(const std::vector<int>& stages, int stage) {
  return std::find(stages.begin(), stages.end(), stage) != stages.end();
}

}  // namespace

namespace unchecked {

Schedule add_sharding(const Schedule& schedule, int max_active_stages) {
  if (max_active_stages < 1) {
    throw ScheduleError("a rank needs at least one gathered stage to compute, not " +
                        std::to_string(max_active_stages) + ".");
  }
  Schedule result = schedule.without_actions();
  std::vector<std::size_t> next(static_cast<std::size_t>(schedule.stages()), LookAhead::kNever);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    const auto actions = schedule.actions(rank);
    LookAhead ahead(actions, schedule.placement().stages_of(rank), next);
    std::vector<Action> list;
    list.reserve(actions.size() + actions.size() / 8);
    std::vector<int> active;
    std::vector<int> wanted;
    bool changed = true;
    for (const Action& action : actions) {
      if (!action.is_compute()) {
        list.push_back(action);
        continue;
      }
      if (changed) {
        wanted.clear();
        for (std::size_t place = 0; place < ahead.window(max_active_stages); ++place)
          wanted.push_back(ahead.stage(place));
        std::erase_if(active, [&](int stage) {
          if (contains(wanted, stage)) return false;
          list.push_back(parameters(stage, Computation::Reshard));
          return true;
        });
        for (const int stage : wanted) {
          if (contains(active, stage)) continue;
          active.push_back(stage);
          list.push_back(parameters(stage, Computation::Unshard));
        }
      }
      list.push_back(action);
      changed = ahead.advance(max_active_stages);
    }
    for (const int stage : active) list.push_back(parameters(stage, Computation::Reshard));
    result.assign(rank, std::move(list));
  }
  return result;
}

}  // namespace unchecked
}  // namespace penstock
