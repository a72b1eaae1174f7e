// The StageGraph describes which stages send activations to which, and which stages share parameters. Stages form a
// chain; a skip connection is an additional edge from an earlier stage to a later one. Stages that share parameters
// form a group, whose gradients are summed; groups with a stage in common are merged.
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

// Direction in which a message travels along an edge: activations forward, gradients backward.
enum class Direction { Forward, Backward };

// Returns the edge that a message travels along. Gradients travel it backwards.
Edge edge_under(const Action& message);

class StageGraph {
 public:
  // Makes a chain of stages. Throws ScheduleError if there is none.
  explicit StageGraph(int stages);

  // Adds an edge. Adding an existing edge, such as one of the chain, has no effect. Throws ScheduleError unless
  // 0 <= from < to < stages.
  void add_edge(int from, int to);
  // Adds several edges, sorting them only once.
  void add_edges(std::span<const Edge> edges);
  // Declares that stages share parameters. Throws ScheduleError for fewer than two stages, or a stage out of range.
  void share(std::vector<int> stages);

  int stages() const { return stages_; }

  // Returns all edges, including the chain's, ordered by (to, from).
  std::span<const Edge> edges() const { return edges_; }
  // Return indices into edges() of the edges to a stage and from a stage, in ascending order of the stage at the other
  // end.
  std::span<const int> in_edges(int stage) const { return in_.of(stage); }
  std::span<const int> out_edges(int stage) const { return out_.of(stage); }
  // Returns the index of an edge, or -1 if there is no such edge.
  int edge_index(int from, int to) const;
  // Returns the skip connections: all edges but the chain's.
  std::vector<Edge> skips() const;

  // Returns the groups of stages that share parameters. Groups are disjoint, ordered by their first stage, and
  // ascending.
  std::span<const std::vector<int>> groups() const { return groups_; }
  // Returns the index of a stage's group, or -1 if the stage shares no parameters.
  int group_of(int stage) const { return group_of_[static_cast<std::size_t>(stage)]; }

  friend bool operator==(const StageGraph&, const StageGraph&) = default;

 private:
  // Compressed adjacency lists: the edges of stage s are edges[begin[s]] to edges[begin[s + 1] - 1].
  struct Incidence {
    std::vector<int> edges;
    std::vector<std::size_t> begin;

    std::span<const int> of(int stage) const {
      const auto index = static_cast<std::size_t>(stage);
      return std::span(edges).subspan(begin[index], begin[index + 1] - begin[index]);
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
