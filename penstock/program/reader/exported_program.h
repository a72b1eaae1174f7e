// The exported program, as it is stored in the archive: the graph and its signature.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "penstock/program/graph.h"
#include "penstock/program/partition/effects.h"
#include "penstock/program/reader/allowed_operators.h"
#include "penstock/program/reader/archive.h"
#include "penstock/program/reader/pytree.h"

namespace penstock::internal {

struct ExportedProgram {
  Graph graph;
  // Aliases and mutations of the graph's nodes.
  Effects effects;
  std::vector<ProgramInput> inputs;
  std::vector<ProgramOutput> outputs;
  // Structure of the inputs, a tuple of the positional arguments and a dict of the keyword arguments, whose leaves are
  // the user and the fixed inputs.
  TreeSpec in_spec;
  // Structure of the user outputs.
  TreeSpec out_spec;
  // Ranges of the symbols in dynamic shapes.
  std::map<std::string, SymbolRange> ranges;
};

// Reads the program of an archive. Throws ProgramError if it is damaged, has another schema version, or contains
// something that cannot be run; the error names the node and its module.
ExportedProgram read_exported_program(const Archive& archive, const AllowedOperators& allowed);

}  // namespace penstock::internal
