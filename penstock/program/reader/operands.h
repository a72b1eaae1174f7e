// What the nodes of an export are given, read from its schema.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>

#include "penstock/program/graph.h"
#include "penstock/program/reader/schema.h"

namespace penstock::internal {

// Names in a graph, and in the graphs inside of it: what each stands for.
using Scope = std::unordered_map<std::string, Operand>;

Operand constant(c10::IValue value);
// The schema's types are of their first kind when they are of none that is known, and throw when they are asked for it:
// that becomes a ProgramError.
void require_kind(const std::function<void()>& get, const std::string& otherwise);
// Lets a name stand for something. Throws ProgramError if it does already.
void introduce(const std::string& name, Operand operand, Scope& scope);
// Each throws ProgramError, without the place, for a name that nothing before has, and for what cannot be read.
const Operand& look_up(const std::string& name, const Scope& scope);
Operand operand_of(const schema::Argument& argument, const Scope& scope);
Operand operand_of(const schema::TensorArgument& tensor, const Scope& scope);
// The name of a single value; empty for what has none.
std::string name_of(const schema::Argument& argument);

}  // namespace penstock::internal
