// A part of a program that can be run: a stage, or all of it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/program/graph.h"
#include "penstock/program/interpreter/interpreter.h"
#include "penstock/program/reader/exported.h"

namespace penstock::internal {

class Part {
 public:
  struct Write {
    // What is written when all has run, and where to: a buffer or a parameter by its value, or an input by its number.
    Operand operand;
    int value = -1;
    int input = -1;
    // Of something that only training counts.
    bool in_training_only = false;
  };
  struct Contents {
    // In the order in which they run.
    std::vector<int> nodes = {};
    // What it takes, what it has, and what it gives.
    std::vector<int> inputs = {};
    // Whether these are the user's own, who is to see what is written to them.
    bool inputs_are_given = false;
    std::vector<std::pair<int, at::Tensor>> held = {};
    std::vector<Operand> outputs = {};
    std::vector<Write> writes = {};
  };

  Part(const std::shared_ptr<const Exported>& exported, Contents contents, std::shared_ptr<const Code::Mode> mode);

  // Throws ProgramError, which names the node that failed.
  std::vector<c10::IValue> run(std::vector<c10::IValue> inputs) const;

 private:
  std::shared_ptr<const Code::Mode> mode_;
  std::vector<Write> writes_;
  // Buffers that are written to. What they held may be kept for the backward, so a run works on copies, and writes at the
  // end.
  std::vector<at::Tensor> written_;
  std::size_t outputs_;
  Code code_;
};

}  // namespace penstock::internal
