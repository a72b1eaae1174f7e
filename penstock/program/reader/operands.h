// Reads the arguments of nodes.
#pragma once

#include <functional>
#include <string>
#include <unordered_map>

#include "penstock/program/graph.h"
#include "penstock/program/reader/schema.h"

namespace penstock::internal {

// The operand that each name in a graph stands for.
using Scope = std::unordered_map<std::string, Operand>;

// Returns an operand with a constant value.
Operand constant(c10::IValue value);
// Calls a getter of the schema's union types. A union of an unknown kind has the tag of its first alternative, and its
// getter throws; that becomes a ProgramError with this message.
void require_kind(const std::function<void()>& get, const std::string& message);
// Adds a name to a scope. Throws ProgramError if it is taken.
void introduce(const std::string& name, Operand operand, Scope& scope);
// Returns the operand of a name. Throws ProgramError for a name that is not in scope.
const Operand& look_up(const std::string& name, const Scope& scope);
// Return the operand for an argument of the schema. Throws ProgramError for names that are not in scope and for
// arguments that are not supported. The caller adds the place to the message.
Operand operand_of(const schema::Argument& argument, const Scope& scope);
Operand operand_of(const schema::TensorArgument& tensor, const Scope& scope);
// Returns the name of an argument that is a single value; empty for any other.
std::string name_of(const schema::Argument& argument);

}  // namespace penstock::internal
