// A Program is a model that torch.export.save has written: its graph, its weights, and how to run it, without Python.
//
//   Program program("model.pt2");
//   c10::IValue output = program.run({x}, {{"mask", mask}});   // with autograd, as the model itself
//   Pipe pipe = pipeline(program, {{"blocks.4", SplitPoint::BEGINNING}});
//
// Copies are the same program: they share weights and mode.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "penstock/program/error.h"
#include "penstock/program/graph.h"
#include "penstock/program/reader/archive.h"
#include "penstock/program/reader/exported.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

struct ProgramOptions {
  // Operators that the program may call besides those that only compute on their arguments, such as those of a library that
  // you have loaded: "library::name" for all overloads, or "library::name.overload".
  std::vector<std::string> allowed_operators = {};
};

class Program {
 public:
  // Throws ProgramError, which names the file and what is wrong in it.
  explicit Program(const std::string& path, const ProgramOptions& options = {});
  explicit Program(const Archive& archive, const ProgramOptions& options = {});

  // The model's output. Arguments are checked against the shapes of the export. Throws ProgramError, which names the
  // argument, or the node that failed.
  c10::IValue run(const Args& args, const Kwargs& kwargs = {}) const;

  // Dropout drops and batch normalisation learns, or not; as the program was exported, until one of them is called. Of a
  // program that was exported in evaluation mode, train() throws ProgramError, which names what it has lost; so does
  // eval() of one that drops without a flag for it.
  void train();
  void eval();
  bool is_training() const;
  // Runs all of it under autocast to this dtype, on the CPU: bfloat16, or none.
  void set_autocast(std::optional<at::ScalarType> dtype);

  // By the model's own names, those that are one tensor under several names too; buffers that a state_dict does not have
  // are marked in inputs().
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  // As the model's state_dict has it: parameters and persistent buffers.
  NamedTensors state_dict() const;
  // Copies these into the weights. Stages that have been cut keep their copies of a parameter that several of them use, so
  // load before the program is cut. Of a tied parameter one name is enough, and a buffer that a state_dict leaves out may
  // be there. Throws ProgramError, which begins with `source` and lists what differs (state_differences), and changes
  // nothing if names, shapes or dtypes are not the program's.
  void load_state_dict(const NamedTensors& state, const std::string& source = "the state_dict");
  // Writes a copy of `archive`, which this program was read from, with the weights as they are now. torch.export.load reads
  // it. `path` is replaced when all of it is on the disk. Throws ProgramError.
  void write_archive(const Archive& archive, const std::string& path) const;

  const Graph& graph() const;
  const std::vector<ProgramInput>& inputs() const;
  const std::vector<ProgramOutput>& outputs() const;
  const TreeSpec& in_spec() const;
  const TreeSpec& out_spec() const;
  const std::map<std::string, SymbolRange>& ranges() const;
  // The tensor behind an input that is a parameter, a buffer or a constant.
  const at::Tensor& tensor(const ProgramInput& input) const;
  // Of the file.
  const std::string& name() const;

  // The values of inputs that the user gives, in the order of inputs(), from arguments in their structure. Checked.
  std::vector<c10::IValue> flatten_inputs(const Args& args, const Kwargs& kwargs) const;

  // state.h
  struct State;
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace penstock
