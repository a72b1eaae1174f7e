#include "penstock/program/partition/colocation.h"

#include <array>

#include "penstock/base/index.h"
#include "penstock/base/text.h"

namespace penstock::internal {
namespace {

// Constrains the users of a weight before its last write in place. Users after that receive what was written.
void add_mutated_in_place(const ExportedProgram& exported, const ProgramInput& weight,
                          std::vector<ColocationConstraint>& constraints) {
  const std::vector<int>& writers = exported.effects.writers[index(weight.value)];
  if (writers.empty()) return;
  for (const int user : exported.effects.users[index(weight.value)]) {
    if (user < writers.back()) {
      constraints.push_back({.kind = ColocationConstraint::Kind::MutatedState,
                             .writer = writers.back(),
                             .user = user,
                             .name = weight.name});
    }
  }
}

// Constrains the users of what the program mutates at its end, by the stage that produces the new content.
void add_mutated_at_end(const ExportedProgram& exported, const ProgramOutput& output,
                        std::vector<ColocationConstraint>& constraints) {
  const int writer = output.operand.is_value() ? exported.graph.values[index(output.operand.value)].producer : -1;
  if (output.kind == ProgramOutput::Kind::Input) {
    constraints.push_back(
        {.kind = ColocationConstraint::Kind::MutatedInput, .writer = writer, .user = -1, .name = output.target});
    return;
  }
  for (const ProgramInput& weight : exported.inputs) {
    if (weight.name != output.target || weight.value < 0) continue;
    for (const int user : exported.effects.users[index(weight.value)]) {
      constraints.push_back(
          {.kind = ColocationConstraint::Kind::MutatedState, .writer = writer, .user = user, .name = weight.name});
    }
  }
}

// Constrains writers and users of two values of which the first may be the second.
void add_ambiguous_alias(const ExportedProgram& exported, int view, int base,
                         std::vector<ColocationConstraint>& constraints) {
  const Effects& effects = exported.effects;
  const std::vector<Value>& values = exported.graph.values;
  const int producer = values[index(view)].producer;
  const std::string names = concat("'", values[index(base)].name, "' and '", values[index(view)].name, "'");
  const std::array roots{effects.root_of(base), effects.root_of(view)};
  for (const int written : roots) {
    const int other = written == roots[0] ? roots[1] : roots[0];
    for (const int writer : effects.writers[index(written)]) {
      // Both values have what was written before.
      if (writer < producer) continue;
      for (const int user : effects.users[index(other)]) {
        if (user < writer) continue;
        constraints.push_back(
            {.kind = ColocationConstraint::Kind::AmbiguousAlias, .writer = writer, .user = user, .name = names});
        constraints.push_back(
            {.kind = ColocationConstraint::Kind::AmbiguousAlias, .writer = writer, .user = producer, .name = names});
      }
    }
  }
}

}  // namespace

std::set<int> mutated_values(const ExportedProgram& exported) {
  std::set<std::string> targets;
  for (const ProgramOutput& output : exported.outputs) {
    if (output.kind != ProgramOutput::Kind::User && output.kind != ProgramOutput::Kind::Input)
      targets.insert(output.target);
  }
  std::set<int> written;
  for (const ProgramInput& input : exported.inputs) {
    if (input.value < 0 || input.kind == ProgramInput::Kind::User) continue;
    const bool in_place = !exported.effects.writers[index(input.value)].empty();
    if (in_place || targets.contains(input.name)) written.insert(input.value);
  }
  return written;
}

std::vector<ColocationConstraint> colocation_constraints(const ExportedProgram& exported) {
  std::vector<ColocationConstraint> constraints;
  for (const ProgramInput& input : exported.inputs) {
    if (input.value >= 0 && input.kind != ProgramInput::Kind::User) add_mutated_in_place(exported, input, constraints);
  }
  for (const ProgramOutput& output : exported.outputs) {
    if (output.kind != ProgramOutput::Kind::User) add_mutated_at_end(exported, output, constraints);
  }
  const std::vector<int>& maybe_alias_of = exported.effects.maybe_alias_of;
  for (std::size_t view = 0; view < maybe_alias_of.size(); ++view) {
    if (maybe_alias_of[view] >= 0)
      add_ambiguous_alias(exported, static_cast<int>(view), maybe_alias_of[view], constraints);
  }
  return constraints;
}

}  // namespace penstock::internal
