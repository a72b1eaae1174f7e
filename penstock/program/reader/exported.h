// What an export says: the graph, what goes into it and comes out of it, and the weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "penstock/program/graph.h"
#include "penstock/program/partition/effects.h"
#include "penstock/program/reader/allowed_operators.h"
#include "penstock/program/reader/archive.h"
#include "penstock/program/reader/pytree.h"

namespace penstock::internal {

struct ProgramInput {
  // Fixed: a number, text or None that the export has taken for good.
  enum class Kind { Parameter, Buffer, Constant, Object, User, Fixed };

  Kind kind = Kind::User;
  // In the graph; -1 for what is fixed.
  int value = -1;
  // The model's own, such as "blocks.0.weight"; of what the user gives, the way to it, such as "args.0".
  std::string name;
  // Of a buffer: whether a state_dict has it.
  bool persistent = true;
  c10::IValue fixed = {};
};

struct ProgramOutput {
  // What is given to the user, or written to a buffer, a parameter or an input when all is done.
  enum class Kind { User, Buffer, Parameter, Input };

  Kind kind = Kind::User;
  Operand operand;
  // What is written to: a name of ProgramInput's.
  std::string target;
};

// What a symbol stands for.
struct SymbolRange {
  std::int64_t least = 0;
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
};

struct Exported {
  Graph graph;
  // What its nodes do to memory.
  Effects effects;
  std::vector<ProgramInput> inputs;
  std::vector<ProgramOutput> outputs;
  // A tuple of the arguments and a dict of the keyword arguments, whose leaves are the inputs that are the user's or
  // fixed; and what comes out.
  TreeSpec in_spec;
  TreeSpec out_spec;
  std::map<std::string, SymbolRange> ranges;
};

// Throws ProgramError for what cannot be read: damaged, of another version, or with something that cannot be run, which
// is named with the module that it came from.
Exported read_exported(const Archive& archive, const AllowedOperators& allowed);

// Parameters, buffers and constants by their names. What is one tensor in the model is one here, under all its names. With
// `records`, returns there the records of the archive that they lie in, as bytes that share their memory.
std::map<std::string, at::Tensor> read_weights(const Archive& archive,
                                               std::map<std::string, at::Tensor>* records = nullptr);

}  // namespace penstock::internal
