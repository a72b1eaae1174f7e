#include "penstock/program/partition/colocation.h"

#include <array>

namespace penstock::internal {
namespace {

std::size_t index(int number) {
  return static_cast<std::size_t>(number);
}

// Before the last that writes in place. What comes after that takes what was written from its stage.
void bind_written_in_place(const Exported& exported, const ProgramInput& held, std::vector<Bond>& bonds) {
  const std::vector<int>& writers = exported.effects.writers[index(held.value)];
  if (writers.empty()) return;
  for (const int user : exported.effects.users[index(held.value)]) {
    if (user < writers.back()) {
      bonds.push_back({.kind = Bond::Kind::Held, .writer = writers.back(), .user = user, .name = held.name});
    }
  }
}

// What is written when all is done is written where it is made.
void bind_written_at_the_end(const Exported& exported, const ProgramOutput& output, std::vector<Bond>& bonds) {
  const int writer = output.operand.is_value() ? exported.graph.values[index(output.operand.value)].producer : -1;
  if (output.kind == ProgramOutput::Kind::Input) {
    bonds.push_back({.kind = Bond::Kind::Given, .writer = writer, .user = -1, .name = output.target});
    return;
  }
  for (const ProgramInput& held : exported.inputs) {
    if (held.name != output.target || held.value < 0) continue;
    for (const int user : exported.effects.users[index(held.value)]) {
      bonds.push_back({.kind = Bond::Kind::Held, .writer = writer, .user = user, .name = held.name});
    }
  }
}

// `view` may be `base` itself.
void bind_doubtful(const Exported& exported, int view, int base, std::vector<Bond>& bonds) {
  const Effects& effects = exported.effects;
  const std::vector<Value>& values = exported.graph.values;
  const int maker = values[index(view)].producer;
  const std::string names = "'" + values[index(base)].name + "' and '" + values[index(view)].name + "'";
  const std::array roots{effects.root_of(base), effects.root_of(view)};
  for (const int written : roots) {
    const int other = written == roots[0] ? roots[1] : roots[0];
    for (const int writer : effects.writers[index(written)]) {
      // What was written before is in both.
      if (writer < maker) continue;
      for (const int user : effects.users[index(other)]) {
        if (user < writer) continue;
        bonds.push_back({.kind = Bond::Kind::Doubtful, .writer = writer, .user = user, .name = names});
        bonds.push_back({.kind = Bond::Kind::Doubtful, .writer = writer, .user = maker, .name = names});
      }
    }
  }
}

}  // namespace

std::set<int> written_values(const Exported& exported) {
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

std::vector<Bond> bonds_of(const Exported& exported) {
  std::vector<Bond> bonds;
  for (const ProgramInput& input : exported.inputs) {
    if (input.value >= 0 && input.kind != ProgramInput::Kind::User) bind_written_in_place(exported, input, bonds);
  }
  for (const ProgramOutput& output : exported.outputs) {
    if (output.kind != ProgramOutput::Kind::User) bind_written_at_the_end(exported, output, bonds);
  }
  const std::vector<int>& maybe_of = exported.effects.maybe_of;
  for (std::size_t view = 0; view < maybe_of.size(); ++view) {
    if (maybe_of[view] >= 0) bind_doubtful(exported, static_cast<int>(view), maybe_of[view], bonds);
  }
  return bonds;
}

}  // namespace penstock::internal
