// A Schedule is data: for each rank a list of actions, with the placement of stages on ranks, the graph of stages and
// the number of microbatches. Generators make one of computations only; passes turn one into another; the verifier,
// the simulator, the drawings and the executor read it.
//
// How a list runs, and what all of them mean by it:
//  - A rank takes its actions in order. The parts of a pair run in turn, each when its inputs are there; what they send
//    stands behind the pair, so that nothing the second part waits for may depend on the first by way of another rank.
//  - F of a stage needs the F of each stage that feeds it; I or B needs its own F and the I or B of each stage that it
//    feeds; W needs its I. What comes from another rank needs a RECV, posted earlier in the list, and the matching SEND.
//  - RECV posts a receive and returns. SEND follows what it sends, and may block until its receive is posted.
//  - UNSHARD and RESHARD take turns; in between a stage may compute. At the end all is resharded.
//  - REDUCE_GRAD of a stage follows its last weight gradient.
//  - SUM_SHARED is a meeting: each rank of a group joins it once, under the name of any of its stages in the group,
//    after REDUCE_GRAD and the last weight gradient of all of these, and goes on when the last rank has come.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "penstock/schedule/action.h"
#include "penstock/schedule/graph.h"
#include "penstock/schedule/placement.h"

namespace penstock {

class ScheduleSource;

class Schedule {
 public:
  // An empty schedule on a chain of stages, or on `graph`. Throws ScheduleError when the graph has another number of
  // stages than the placement, or there is no microbatch.
  Schedule(const Placement& placement, int microbatches);
  Schedule(Placement placement, StageGraph graph, int microbatches);

  int ranks() const { return placement_.ranks(); }
  int stages() const { return placement_.stages(); }
  int microbatches() const { return microbatches_; }
  const Placement& placement() const { return placement_; }
  const StageGraph& graph() const { return graph_; }

  std::span<const Action> actions(int rank) const& { return lists_[static_cast<std::size_t>(rank)]; }
  // The list of a schedule that is about to go away.
  std::span<const Action> actions(int rank) && = delete;
  // Of all ranks together.
  std::size_t size() const;

  void add(int rank, const Action& action) { lists_[static_cast<std::size_t>(rank)].push_back(action); }
  // Moves a rank's list out, and leaves an empty one.
  std::vector<Action> take(int rank) { return std::exchange(lists_[static_cast<std::size_t>(rank)], {}); }
  // Room for so many actions, for who knows how many there will be.
  void reserve(int rank, std::size_t actions) { lists_[static_cast<std::size_t>(rank)].reserve(actions); }
  void assign(int rank, std::vector<Action> actions) { lists_[static_cast<std::size_t>(rank)] = std::move(actions); }

  // Returns the same placement, graph, number of microbatches and source, with empty lists.
  Schedule without_actions() const;
  // The same lists on another graph of as many stages.
  Schedule with_graph(StageGraph graph) const;

  // The index of a stage and a microbatch in a table of all of them.
  std::size_t cell(int stage, int microbatch) const {
    return static_cast<std::size_t>(stage) * static_cast<std::size_t>(microbatches_) +
           static_cast<std::size_t>(microbatch);
  }
  std::size_t cells() const { return cell(stages(), 0); }

  // The file that the schedule was read from, for error messages (source.h); null if it was not read from one.
  const std::shared_ptr<const ScheduleSource>& source() const { return source_; }
  void set_source(std::shared_ptr<const ScheduleSource> source) { source_ = std::move(source); }

  // Compares everything but the source.
  friend bool operator==(const Schedule& one, const Schedule& other) {
    return one.placement_ == other.placement_ && one.graph_ == other.graph_ &&
           one.microbatches_ == other.microbatches_ && one.lists_ == other.lists_;
  }

 private:
  Placement placement_;
  StageGraph graph_;
  int microbatches_;
  std::vector<std::vector<Action>> lists_;
  std::shared_ptr<const ScheduleSource> source_;
};

// What a schedule contains besides forwards. A schedule is checked for the whole of each: one REDUCE_GRAD means one for
// every stage.
struct Features {
  bool backward = false;
  bool communication = false;
  bool sharding = false;
  bool reduction = false;
  bool shared_sums = false;

  bool computations_only() const { return !communication && !sharding && !reduction && !shared_sums; }
  friend bool operator==(const Features&, const Features&) = default;
};

Features features_of(const Schedule& schedule);

// "4 ranks, 8 stages, 8 microbatches"
std::string size_text(const Schedule& schedule);
// "1 rank", "2 ranks", "3 microbatches"
std::string counted(std::size_t number, const std::string& what);

}  // namespace penstock
