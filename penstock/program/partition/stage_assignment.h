// The stage of each node of a graph, and what follows from it for values: where they are produced and where they are
// mutated.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "penstock/base/index.h"
#include "penstock/program/partition/colocation.h"
#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

class StageAssignment {
 public:
  // `stage_of_node` has the stage of each node; the stages are numbered from 0 without gaps. Nodes that only check
  // something move to the earliest stage that has their operands, so that nothing is sent for them. The exported
  // program has to outlive the assignment.
  StageAssignment(const ExportedProgram& exported, std::vector<int> stage_of_node);

  // Throws ProgramError if stages cannot run in their order: a node uses a value of a later stage, violates a
  // colocation constraint, or mutates memory in an order that no order of the stages gives. The error names the nodes
  // and stages.
  void check() const;

  const ExportedProgram& exported() const { return exported_; }
  int num_stages() const { return num_stages_; }
  int stage_of(int node) const { return stage_of_node_[index(node)]; }
  const Node& node(int node) const { return exported_.graph.nodes[index(node)]; }
  const Value& value(int value) const { return exported_.graph.values[index(value)]; }

  // Returns the index of a value among the program's inputs, or -1.
  int input_index(int value) const { return input_of_[index(value)]; }
  // Returns true for a parameter, a buffer or a constant.
  bool is_weight(int value) const;
  // Returns the stage that produces a value; 0 for an input.
  int home(int value) const { return home_[index(value)]; }
  // Returns the stages that write to the memory of a value, which is no view.
  const std::set<int>& writing_stages(int root) const { return written_in_[index(root)]; }
  // Returns the stages that write through a value or its views, detached views apart.
  const std::set<int>& stages_writing_through(int origin) const { return written_through_[index(origin)]; }
  // Returns true if a stage after the producer's writes to the value.
  bool is_written_later(int root) const;
  bool is_detached_view(int value) const;

 private:
  std::string describe_node(int node) const;
  // Returns the value at which the gradients of a value and its views meet: the value whose memory they share, or a
  // detached view of it.
  int origin_of(int value) const;
  void move_checks();
  void check_order() const;
  void check_colocation() const;
  void check_detached_views() const;

  const ExportedProgram& exported_;
  std::vector<int> stage_of_node_;
  int num_stages_;
  std::vector<ColocationConstraint> constraints_;
  // The following are indexed by value.
  std::vector<int> input_of_;
  std::vector<int> home_;
  std::vector<std::set<int>> written_in_;
  std::vector<std::set<int>> written_through_;
};

}  // namespace penstock::internal
