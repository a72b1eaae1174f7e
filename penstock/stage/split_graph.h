// Divides the autograd graph of a stage between the two halves of its backward (backward.h).
//
// A node that leads to an input of the stage runs in the input half, any other in the weight half. A node that leads to
// both an input and a parameter is replaced by a BorderNode, which runs in both.
#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace penstock::internal {

// Stands in the graph for a node that leads both to an input and to a parameter: in the input half with the edges
// towards the inputs, in the weight half with the others. It has the node's sequence number, by which the engine orders
// nodes, so that sums of gradients are formed in the order of a whole backward.
class BorderNode final : public torch::autograd::Node {
 public:
  using NodePtr = c10::intrusive_ptr<Node>;
  using edge_list = torch::autograd::edge_list;
  using variable_list = torch::autograd::variable_list;

  // `input_edges` and `weight_edges` are the node's edges towards the inputs and the others, each at its index.
  BorderNode(NodePtr node, edge_list input_edges, edge_list weight_edges);

  std::string name() const override { return "PenstockBorder"; }

  // Changes from the input half to the weight half. The hooks before the node have been called and are dropped.
  void start_weight_half();

  // Releases the node and what it saved, whether or not it has run.
  void release();

  variable_list apply(variable_list&& gradients) override;

 private:
  // Runs the node for the last time, releasing what it saved.
  variable_list run_and_release(variable_list gradients);
  // Runs the node once for both halves, and saves the gradients that leave by the weight edges.
  variable_list run_for_both(variable_list gradients);
  // Does with results what the engine would do in the weight half only. Above all it sums what was broadcast, so that
  // less is saved.
  void validate(const edge_list& edges, variable_list& results) const;

  NodePtr node_;
  edge_list weight_edges_;
  // The gradients that arrived, if the node runs twice; otherwise those that leave by the weight edges.
  variable_list saved_;
  bool runs_twice_ = false;
  bool is_weight_half_ = false;
};

using BorderPtr = c10::intrusive_ptr<BorderNode>;

// Finds the nodes that lead to a stage's inputs, and replaces each of them that leads to a parameter too by a
// BorderNode. It also lists the parameters that it meets, some several times. A graph can be deep, so there is no
// recursion.
class GraphPartition {
 public:
  using Edge = torch::autograd::Edge;
  using Node = torch::autograd::Node;

  // `inputs` is the node at which gradients of inputs end, or null: then no node leads to an input, and the graph stays
  // as it is. `inputs`, `borders` and `parameters` outlive the partition, which appends to the latter two.
  GraphPartition(const Node* inputs, std::vector<BorderPtr>& borders, torch::autograd::variable_list& parameters)
      : inputs_(inputs), borders_(borders), parameters_(parameters) {}

  // Returns true if the root leads to an input; it may then be moved to a border.
  bool leads_to_input(Edge& root) {
    walk(root.function.get());
    return redirect(root);
  }

 private:
  static constexpr std::int64_t kWeightHalf = -2;
  static constexpr std::int64_t kInputHalf = -1;

  // A node on the path from the root, and the next of its edges to follow. The graph keeps the node alive.
  struct PathNode {
    Node* node;
    std::size_t next_edge;
  };

  void walk(Node* root);
  void enter(Node* node);
  // Assigns a node whose children have been assigned.
  void assign(Node& node);
  void add_border(Node& node);
  // Returns true if the edge leads to an input; it is moved to the border that stands for its node, if one does.
  bool redirect(Edge& edge) const;

  const Node* inputs_;
  // For each node that has children: kWeightHalf, kInputHalf, or the index of its border.
  ska::flat_hash_map<const Node*, std::int64_t> halves_;
  std::vector<BorderPtr>& borders_;
  torch::autograd::variable_list& parameters_;
  std::vector<PathNode> path_;
  // For each edge of the node that is being assigned: true if it leads to an input.
  std::vector<bool> to_input_;
};

}  // namespace penstock::internal
