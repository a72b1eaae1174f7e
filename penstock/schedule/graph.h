// The StageGraph says which stage feeds which, and which stages share parameters. Stages form a chain; a skip
// connection is one more edge from an earlier stage to a later one. Groups of stages that share parameters sum their
// gradients; groups with a stage in common meet as one.
//
//   StageGraph graph(4);
//   graph.add_edge(0, 3);     // a skip connection
//   graph.share({0, 3});      // tied embeddings
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "penstock/schedule/action.h"

namespace penstock {

struct Edge {
  int from = 0;
  int to = 0;
  friend auto operator<=>(const Edge&, const Edge&) = default;
};

// The edge that a message goes along; gradients go against it.
Edge edge_under(const Action& message);

class StageGraph {
 public:
  // A chain of stages.
  explicit StageGraph(int stages);

  // Adds an edge; one that is there already, such as an edge of the chain, changes nothing. Throws ScheduleError unless
  // 0 <= from < to < stages.
  void add_edge(int from, int to);
  // The same for many at once.
  void add_edges(std::span<const Edge> edges);
  // Lets stages share parameters. Throws ScheduleError for fewer than two stages, or one that there is not.
  void share(std::vector<int> stages);

  int stages() const { return stages_; }

  // All edges, the chain's too, ordered by where they lead.
  std::span<const Edge> edges() const { return edges_; }
  // Indices into edges() of what leads to a stage, and of what leads away from it, in ascending order of the other end.
  std::span<const int> in_edges(int stage) const { return in_.of(stage); }
  std::span<const int> out_edges(int stage) const { return out_.of(stage); }
  // The index of an edge, or -1.
  int edge_index(int from, int to) const;
  // Edges besides the chain.
  std::vector<Edge> skips() const;

  // Stages that share parameters: disjoint, each group ascending, ordered by their first stage.
  std::span<const std::vector<int>> groups() const { return groups_; }
  // The index of a stage's group, or -1.
  int group_of(int stage) const { return group_of_[static_cast<std::size_t>(stage)]; }

  friend bool operator==(const StageGraph&, const StageGraph&) = default;

 private:
  // The edges at each stage, in one row, and where each stage's begin.
  struct Incidence {
    std::vector<int> edges;
    std::vector<std::size_t> begin;

    std::span<const int> of(int stage) const {
      const auto at = static_cast<std::size_t>(stage);
      return std::span(edges).subspan(begin[at], begin[at + 1] - begin[at]);
    }
    friend bool operator==(const Incidence&, const Incidence&) = default;
  };

  void index_edges();
  Incidence incidence(int Edge::* end) const;

  int stages_;
  std::vector<Edge> edges_;
  Incidence in_;
  Incidence out_;
  std::vector<std::vector<int>> groups_;
  std::vector<int> group_of_;
};

}  // namespace penstock
