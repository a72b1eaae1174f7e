#include "penstock/program/partition/stage_assignment.h"

#include <algorithm>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/error.h"

namespace penstock::internal {
namespace {

constexpr const char* kSameStage = "\n  Hint: cut so that both are in one stage.";

}  // namespace

StageAssignment::StageAssignment(const ExportedProgram& exported, std::vector<int> stage_of_node)
    : exported_(exported),
      stage_of_node_(std::move(stage_of_node)),
      num_stages_(stage_of_node_.empty() ? 1 : *std::ranges::max_element(stage_of_node_) + 1),
      constraints_(colocation_constraints(exported)),
      input_of_(exported.graph.values.size(), -1),
      home_(exported.graph.values.size(), 0),
      written_in_(exported.graph.values.size()),
      written_through_(exported.graph.values.size()) {
  for (std::size_t i = 0; i < exported.inputs.size(); ++i) {
    if (exported.inputs[i].value >= 0) input_of_[index(exported.inputs[i].value)] = static_cast<int>(i);
  }
  move_checks();
  for (std::size_t i = 0; i < exported.graph.nodes.size(); ++i) {
    for_each_result(exported.graph.nodes[i], [&](int result) { home_[index(result)] = stage_of_node_[i]; });
    for (const int written : exported.effects.writes[i]) {
      written_in_[index(exported.effects.root_of(written))].insert(stage_of_node_[i]);
      written_through_[index(origin_of(written))].insert(stage_of_node_[i]);
    }
  }
}

// A node without results and writes only checks something. One that is part of a constraint stays: what it checks is
// mutated.
void StageAssignment::move_checks() {
  std::set<int> constrained;
  for (const ColocationConstraint& constraint : constraints_) constrained.insert(constraint.user);
  for (std::size_t i = 0; i < exported_.graph.nodes.size(); ++i) {
    const Node& node = exported_.graph.nodes[i];
    bool has_effect = !exported_.effects.writes[i].empty();
    for_each_result(node, [&](int) { has_effect = true; });
    if (has_effect || constrained.contains(static_cast<int>(i))) continue;
    stage_of_node_[i] = 0;
    for_each_operand_value(node, [&](int operand) {
      const int producer = value(operand).producer;
      if (producer >= 0) stage_of_node_[i] = std::max(stage_of_node_[i], stage_of(producer));
    });
  }
}

bool StageAssignment::is_weight(int value) const {
  const int input = input_index(value);
  return input >= 0 && exported_.inputs[index(input)].kind != ProgramInput::Kind::User;
}

bool StageAssignment::is_written_later(int root) const {
  const std::set<int>& writing = writing_stages(root);
  return !writing.empty() && *writing.rbegin() > home(root);
}

bool StageAssignment::is_detached_view(int value) const {
  const int producer = this->value(value).producer;
  return exported_.effects.view_of[index(value)] >= 0 && producer >= 0 &&
         node(producer).operator_name() == "aten::detach";
}

int StageAssignment::origin_of(int value) const {
  const std::vector<int>& view_of = exported_.effects.view_of;
  while (view_of[index(value)] >= 0 && !is_detached_view(value)) value = view_of[index(value)];
  return value;
}

std::string StageAssignment::describe_node(int node) const {
  return describe(exported_.graph, this->node(node));
}

void StageAssignment::check() const {
  check_order();
  check_colocation();
  check_detached_views();
}

void StageAssignment::check_order() const {
  std::vector<int> last_stage(exported_.graph.values.size(), 0);
  std::vector<int> last_node(exported_.graph.values.size(), -1);
  for (int user = 0; user < static_cast<int>(exported_.graph.nodes.size()); ++user) {
    const int stage = stage_of(user);
    for_each_operand_value(node(user), [&](int operand) {
      if (home(operand) > stage && !is_weight(operand)) {
        throw ProgramError(concat(describe_node(user), " is in stage ", stage, " and uses '", value(operand).name,
                                  "', which stage ", home(operand),
                                  " produces; a stage can only use values of earlier stages."));
      }
      const int root = exported_.effects.root_of(operand);
      if (writing_stages(root).empty()) return;
      // Memory that is mutated has to be used in program order.
      if (stage < last_stage[index(root)]) {
        throw ProgramError(concat(describe_node(user), " is in stage ", stage, " and uses '", value(operand).name,
                                  "', which ", describe_node(last_node[index(root)]), " in stage ",
                                  last_stage[index(root)],
                                  " uses before it; the order of the stages has to be the program's where a value is "
                                  "mutated in place."));
      }
      last_stage[index(root)] = stage;
      last_node[index(root)] = user;
    });
  }
}

void StageAssignment::check_colocation() const {
  for (const ColocationConstraint& constraint : constraints_) {
    const int writing = constraint.writer < 0 ? 0 : stage_of(constraint.writer);
    const int reading = constraint.user < 0 ? 0 : stage_of(constraint.user);
    if (writing == reading) continue;
    std::string text;
    switch (constraint.kind) {
      case ColocationConstraint::Kind::MutatedState:
        text =
            concat("'", constraint.name, "' is written to in stage ", writing, ", and ", describe_node(constraint.user),
                   " uses it in stage ", reading, ": the next microbatch would not see what was written.");
        break;
      case ColocationConstraint::Kind::MutatedInput:
        text = concat("the input '", constraint.name, "' is written to by stage ", writing,
                      "; only the first stage can do that.");
        break;
      case ColocationConstraint::Kind::AmbiguousAlias:
        text = concat(describe_node(constraint.writer), " writes in place to what ", describe_node(constraint.user),
                      " uses in another stage; the two are one tensor in evaluation mode only: ", constraint.name, ".");
        break;
    }
    throw ProgramError(text + kSameStage);
  }
}

// A write through a detached view has a gradient that the viewed tensor does not have, so later stages receive the two
// separately. A further write to one of them there would not be seen in the other.
void StageAssignment::check_detached_views() const {
  const Effects& effects = exported_.effects;
  for (int origin = 0; origin < static_cast<int>(exported_.graph.values.size()); ++origin) {
    const int root = effects.root_of(origin);
    const std::set<int>& through = stages_writing_through(origin);
    if (origin == root || through.empty() || *writing_stages(root).rbegin() == *through.begin()) continue;
    for (const int user : effects.users[index(root)]) {
      if (stage_of(user) <= *through.begin()) continue;
      for_each_operand_value(node(user), [&](int operand) {
        if (effects.root_of(operand) != root || origin_of(operand) == origin) return;
        throw ProgramError(concat("'", value(origin).name, "', a detached view of '", value(root).name,
                                  "', is written to in stage ", *through.begin(), ", and ", describe_node(user),
                                  " uses '", value(operand).name, "', the same memory, in stage ", stage_of(user),
                                  ", where one of them is written to again.", kSameStage));
      });
    }
  }
}

}  // namespace penstock::internal
