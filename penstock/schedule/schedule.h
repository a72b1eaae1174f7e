// A Schedule is data: a list of actions for each rank, the placement of stages on ranks, the stage graph and the number
// of microbatches. Generators make schedules of computations only; passes turn one schedule into another; the verifier,
// the simulator, the drawings and the executor read them.
//
// Semantics of a schedule:
//  - A rank executes its actions in order. The parts of a pair run in turn, each when its inputs have arrived. The sends
//    of both parts follow the pair, so no input of the second part may depend on the first part through another rank.
//  - F needs the F of each stage with an edge to its stage; I and B need the F of their own stage, and the I or B of
//    each stage with an edge from it; W needs its I. An input from another rank needs a RECV earlier in the list, and
//    the matching SEND.
//  - R needs its F, and comes before the I or B of its stage and microbatch. Such an F saves the inputs of the stage
//    only, and R computes it again for the backward. Any F may have one.
//  - RECV posts a receive and returns. SEND follows the computation of what it sends, and may block until its receive
//    is posted.
//  - UNSHARD and RESHARD of a stage alternate; the stage computes only between them. At the end every stage is
//    resharded.
//  - REDUCE_GRAD of a stage follows its last weight gradient.
//  - SUM_SHARED is a collective over the ranks of a group of stages that share parameters. Each rank joins it once, with
//    any of its stages in the group, after REDUCE_GRAD and the last weight gradient of all of them, and blocks until all
//    ranks have joined.
//
//   Schedule schedule(loop_placement(/*ranks=*/1, /*stages_per_rank=*/1), /*microbatches=*/1);
//   schedule.add(/*rank=*/0, forward(/*stage=*/0, /*microbatch=*/0));
//   schedule.add(/*rank=*/0, full_backward(/*stage=*/0, /*microbatch=*/0));
#pragma once

#include <cstddef>
#include <memory>
#include <set>
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
  // Makes an empty schedule for a chain of stages, or for `graph`. Throws ScheduleError if the numbers of stages of
  // graph and placement differ, or if there is no microbatch.
  Schedule(const Placement& placement, int microbatches);
  Schedule(Placement placement, StageGraph graph, int microbatches);

  int ranks() const { return placement_.ranks(); }
  int stages() const { return placement_.stages(); }
  int microbatches() const { return microbatches_; }
  const Placement& placement() const { return placement_; }
  const StageGraph& graph() const { return graph_; }

  // Returns the actions of a rank, valid until they are changed.
  std::span<const Action> actions(int rank) const& { return lists_[static_cast<std::size_t>(rank)]; }
  // Deleted for temporaries, whose actions would be destroyed.
  std::span<const Action> actions(int rank) && = delete;
  // Returns the number of actions of all ranks together.
  std::size_t size() const;

  void add(int rank, const Action& action) { lists_[static_cast<std::size_t>(rank)].push_back(action); }
  // Moves a rank's actions out and leaves none.
  std::vector<Action> take(int rank) { return std::exchange(lists_[static_cast<std::size_t>(rank)], {}); }
  // Reserves memory for a number of actions.
  void reserve(int rank, std::size_t actions) { lists_[static_cast<std::size_t>(rank)].reserve(actions); }
  void assign(int rank, std::vector<Action> actions) { lists_[static_cast<std::size_t>(rank)] = std::move(actions); }

  // Returns a schedule with the same placement, graph, number of microbatches and source, but without actions.
  Schedule without_actions() const;
  // Returns the same actions for another graph of the same number of stages.
  Schedule with_graph(StageGraph graph) const;

  // Returns the index of a stage and a microbatch in a table of stages() × microbatches() entries.
  std::size_t cell(int stage, int microbatch) const {
    return static_cast<std::size_t>(stage) * static_cast<std::size_t>(microbatches_) +
           static_cast<std::size_t>(microbatch);
  }
  std::size_t cells() const { return cell(stages(), 0); }

  // Returns the file that the schedule was read from, for error messages (source.h); null if it was not read from a
  // file.
  const std::shared_ptr<const ScheduleSource>& source() const { return source_; }
  void set_source(std::shared_ptr<const ScheduleSource> source) { source_ = std::move(source); }

  // Compares everything but the source.
  friend bool operator==(const Schedule& left, const Schedule& right) {
    return left.placement_ == right.placement_ && left.graph_ == right.graph_ &&
           left.microbatches_ == right.microbatches_ && left.lists_ == right.lists_;
  }

 private:
  Placement placement_;
  StageGraph graph_;
  int microbatches_;
  std::vector<std::vector<Action>> lists_;
  std::shared_ptr<const ScheduleSource> source_;
};

// Kinds of actions that a schedule contains besides forwards. The verifier requires each kind completely or not at all:
// if there is one REDUCE_GRAD, every stage needs one.
struct Features {
  bool backward = false;
  bool communication = false;
  bool sharding = false;
  bool reduction = false;
  bool shared_sums = false;

  bool computations_only() const { return !communication && !sharding && !reduction && !shared_sums; }
  friend bool operator==(const Features&, const Features&) = default;
};

// Returns the kinds of actions that occur in a schedule.
Features features_of(const Schedule& schedule);

// Returns the stages and microbatches for which a rank has an R.
std::set<std::pair<int, int>> recomputed_microbatches(const Schedule& schedule, int rank);

// Returns the size of a schedule: "4 ranks, 8 stages, 8 microbatches".
std::string size_text(const Schedule& schedule);
// Returns a number with its noun: "1 rank", "2 ranks", "3 microbatches".
std::string counted(std::size_t number, const std::string& what);

}  // namespace penstock
