// What the copies of a Program, and the stages that it is cut into, have in common.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "penstock/program/interpreter/interpreter.h"
#include "penstock/program/interpreter/subgraph.h"
#include "penstock/program/program.h"
#include "penstock/tensor/state_dict.h"

namespace penstock {

struct Program::State {
  std::string name;
  std::shared_ptr<const Exported> exported;
  // By name; what is one tensor in the model is one here.
  std::map<std::string, at::Tensor> weights;
  // The archive's records that the weights lie in, as bytes that share their memory.
  std::map<std::string, at::Tensor> weight_records;
  // None if nothing in the program differs between the two.
  std::optional<bool> exported_in_training;
  std::shared_ptr<Code::Mode> mode = std::make_shared<Code::Mode>();
  std::shared_ptr<const Part> whole;

  // Null for what the user gives.
  const at::Tensor* find_tensor(const ProgramInput& input) const;
  c10::IValue number_for(const ProgramInput& input, const c10::IValue& given) const;
  NamedTensors tensors_of(ProgramInput::Kind kind) const;
  // Parameters and buffers, each tensor once with all its names.
  std::vector<ModelTensor> model_tensors() const;
  // All of it, with buffers of its own.
  std::shared_ptr<const Part> part_on_copies(std::shared_ptr<const Code::Mode> own_mode) const;
  // What is to be done at the end for an output that is not the user's.
  Part::Write write_of(const ProgramOutput& output) const;
};

}  // namespace penstock
