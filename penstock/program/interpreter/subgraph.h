// A runnable subgraph of a program: one stage, or the whole program.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "penstock/program/graph.h"
#include "penstock/program/interpreter/interpreter.h"
#include "penstock/program/reader/exported_program.h"

namespace penstock::internal {

class Subgraph {
 public:
  // A tensor that is written to after all nodes have run.
  struct Write {
    // The new content.
    Operand operand;
    // The target: a buffer or parameter by its value, or an input by its index.
    int value = -1;
    int input = -1;
    // True for a write that happens in training mode only.
    bool in_training_only = false;
  };
  struct Contents {
    // Nodes in execution order.
    std::vector<int> nodes = {};
    // Values that the subgraph takes.
    std::vector<int> inputs = {};
    // True if the inputs belong to the user, who has to see what is written to them.
    bool inputs_are_given = false;
    // Parameters, buffers and constants: the value in the graph and the tensor.
    std::vector<std::pair<int, at::Tensor>> weights = {};
    std::vector<Operand> outputs = {};
    std::vector<Write> writes = {};
  };

  Subgraph(const std::shared_ptr<const ExportedProgram>& exported, Contents contents,
           std::shared_ptr<const Interpreter::Mode> mode);

  // Runs the nodes, then the writes, and returns the outputs. Throws ProgramError, which names the node that failed;
  // nothing is written then.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs) const;

 private:
  std::shared_ptr<const Interpreter::Mode> mode_;
  std::vector<Write> writes_;
  // Buffers that are written to. Autograd may have saved their content for the backward, so a run works on copies and
  // writes at its end.
  std::vector<at::Tensor> written_;
  std::size_t outputs_;
  Interpreter interpreter_;
};

}  // namespace penstock::internal
