// The state that copies of a Program and the stages of its Pipes share.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "penstock/program/interpreter/interpreter.h"
#include "penstock/program/interpreter/subgraph.h"
#include "penstock/program/program.h"
#include "penstock/program/reader/archive.h"
#include "penstock/program/reader/exported_program.h"
#include "penstock/program/reader/weights.h"
#include "penstock/tensor/named_tensors.h"
#include "penstock/tensor/state_dict.h"

namespace penstock::internal {

struct ProgramState {
  // Path of the file, or the name that was given for bytes in memory.
  std::string name;
  // File that the program was read from, by its absolute path; none if it was read from memory.
  struct Source {
    std::string path;
    std::uint32_t checksum = 0;
  };
  std::optional<Source> source;
  std::shared_ptr<const ExportedProgram> exported;
  // Parameters, buffers and constants. Functions that return tensors do not load them.
  std::unique_ptr<Weights> weights;
  // None if no node depends on the mode.
  std::optional<bool> exported_in_training;
  std::shared_ptr<Interpreter::Mode> mode = std::make_shared<Interpreter::Mode>();
  // The whole program.
  std::shared_ptr<const Subgraph> whole;

  // Returns null for an input that is no parameter, buffer or constant.
  const at::Tensor* find_tensor(const ProgramInput& input) const;
  // Returns element 0 of a tensor with one element where the program takes a tensor without dimensions: that is what a
  // microbatch of a batch of such tensors looks like. Returns any other argument itself.
  c10::IValue scalar_argument(const ProgramInput& input, const c10::IValue& given) const;
  NamedTensors tensors_of(ProgramInput::Kind kind) const;
  // Returns the parameters and buffers, each tensor once with all its names.
  std::vector<ModelTensor> model_tensors() const;
  // Return the whole program in another mode: on copies of its buffers, and on a device with the weights that
  // `tensor_of` returns for the program's. They load the weights.
  std::shared_ptr<const Subgraph> subgraph_on_copies(std::shared_ptr<const Interpreter::Mode> other_mode) const;
  std::shared_ptr<const Subgraph> subgraph_on(at::Device device, std::shared_ptr<const Interpreter::Mode> other_mode,
                                              const std::function<at::Tensor(const at::Tensor&)>& tensor_of) const;
  // Returns the write to a buffer, a parameter or an input that an output stands for.
  Subgraph::Write write_of(const ProgramOutput& output) const;
};

// Reads a program. Throws ProgramError.
std::shared_ptr<ProgramState> read_program_state(const std::shared_ptr<const Archive>& archive,
                                                 const ProgramOptions& options);

}  // namespace penstock::internal
