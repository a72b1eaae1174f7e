// Decides which stages of a rank are gathered when: at each computation those of this and the following computations,
// up to the maximum number of active stages.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/schedule/error.h"
#include "penstock/schedule/passes/unchecked.h"

namespace penstock::internal {
namespace {

// The stages of a rank, ordered by their next use, as a cursor moves over the rank's actions. The next use of each
// stage is precomputed, so moving the cursor takes time linear in the number of stages and does not search the actions.
class LookAhead {
 public:
  // Next use of a stage that is not used again.
  static constexpr std::size_t kNever = static_cast<std::size_t>(-1);

  // `next` is scratch memory with an entry for each stage; those of this rank are kNever. All ranks use the same, as a
  // stage is on one rank only.
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

  // Returns the number of next stages that may be gathered: `most`, or one more to include both stages of a pair.
  std::size_t window(int most) const {
    const auto size = static_cast<std::size_t>(most);
    if (order_.size() <= size) return order_.size();
    const std::size_t last = order_[size - 1].use / 2;
    return size + (actions_[last].is_overlap() && order_[size].use / 2 == last ? 1 : 0);
  }
  int stage(std::size_t place) const { return order_[place].stage; }

  // Moves the cursor past the next computation. Returns true if window(most) then has other stages than before.
  bool advance(int most) {
    const std::size_t before = window(most);
    const std::size_t action = order_.front().use / 2;
    bool left = false;
    while (!order_.empty() && order_.front().use / 2 == action) left |= move_front_back() >= before;
    return left || window(most) != before;
  }

 private:
  // A use is 2 × the index of its action, plus 1 for the second part of a pair.
  struct NextUse {
    std::size_t use;
    int stage;
    auto operator<=>(const NextUse&) const = default;
  };

  // Moves the front stage to where its next use belongs, and returns that place.
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
  // Next use of the same stage, by action and part of a pair.
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
    throw ScheduleError(concat("max_active_stages must be at least 1, not ", max_active_stages, "."));
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
}  // namespace penstock::internal
