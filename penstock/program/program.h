// A Program is a model that torch.export.save has written: its graph, its weights, and an interpreter that runs it
// without Python.
//
//   Program program("model.pt2");
//   c10::IValue output = program.run({x}, {{"mask", mask}});   // with autograd, like the model itself
//   Pipe pipe = pipeline(program, {{"blocks.4", SplitPoint::BEGINNING}});
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "penstock/program/error.h"
#include "penstock/program/graph.h"
#include "penstock/program/initial_values.h"
#include "penstock/tensor/microbatch.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

class Program;

namespace internal {
struct ProgramState;
ProgramState& state_of(const Program& program);
}  // namespace internal

// Metadata of a parameter or buffer.
struct WeightInfo {
  // All names of the tensor in the model; a tied parameter has several.
  std::vector<std::string> names;
  bool is_parameter = false;
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::ScalarType::Float;
  // True if the state_dict contains it.
  bool persistent = true;

  std::int64_t numel() const;
};

struct ProgramOptions {
  // Operators that the program may call in addition to those that only compute on their arguments, such as the
  // operators of a library that you have loaded: "library::name" for all overloads, or "library::name.overload".
  std::vector<std::string> allowed_operators = {};
};

// The weights stay in the file until they are used: run() and the functions that return tensors load them into memory,
// a Pipe those of the stages that it builds. Until then the file must not be overwritten in place or truncated.
//
// A handle with shared ownership: copies refer to the same weights and the same mode. Any number of threads may call
// run() at once; train(), eval(), set_autocast(), recompute() and load_state_dict() require that no other thread uses
// the program. Functions throw ProgramError.
class Program {
 public:
  // Reads a .pt2 file, without its weights. The file may come from an untrusted source: it runs no code of its own,
  // calls only allowed operators, and is checked before anything is allocated for it. Throws ProgramError, which names
  // the file and the error in it.
  explicit Program(const std::string& path, const ProgramOptions& options = {});
  // Reads the bytes of a .pt2 file. They may be freed afterwards. Errors show `name` in place of a path.
  static Program from_bytes(std::string_view bytes, const std::string& name, const ProgramOptions& options = {});

  // Runs the model and returns its output. Checks the arguments against the shapes of the export. Throws ProgramError,
  // which names the argument or the node that failed.
  c10::IValue run(const Args& args, const Kwargs& kwargs = {}) const;

  // Select training or evaluation mode: dropout and the statistics of batch normalisation depend on it. Initially the
  // mode is that of the export. train() throws ProgramError for a program that was exported in evaluation mode, since
  // the export has dropped what training needs; eval() throws for one that has dropout without a flag for it.
  void train();
  void eval();
  bool is_training() const;
  // Runs the whole program under autocast to this dtype, bfloat16 or float16, or without autocast. Autocast is that of the
  // device on which a stage runs.
  void set_autocast(std::optional<at::ScalarType> dtype);

  // Makes modules save their inputs only, and be computed again when a backward needs their activations: see
  // checkpoint.h. A module within another one is part of it. Names as in ModuleCall::path. Throws ProgramError for a
  // name that is no module; an empty list recomputes nothing.
  void recompute(const std::vector<std::string>& modules);
  // Returns the blocks that the model repeats, such as "blocks.0", "blocks.1", …: elements of lists that call more than
  // one operator that computes something, outermost lists only.
  std::vector<std::string> repeated_modules() const;

  // True if the model was exported on the meta device, so that its weights need initialise() or load_state_dict().
  bool has_no_values() const;
  // Gives initial values to the weights of such a model, each when it is first used: so a process draws those of its
  // own stages only, and they do not depend on the cut. Without a function they are those of
  // initial_values_of_modules().
  void initialise(std::uint64_t seed, InitialValues values = nullptr);

  // Returns the metadata of all parameters and buffers, in the model's order, each with all its names.
  std::vector<WeightInfo> weights() const;
  // Return the parameters or buffers under the model's names. A tensor that is tied under several names appears under
  // each. ProgramInput::persistent tells which buffers the state_dict contains.
  NamedTensors parameters() const;
  NamedTensors buffers() const;
  // Returns the parameters and persistent buffers, as the model's state_dict does.
  NamedTensors state_dict() const;
  // Returns the parameters, buffers and constants that run() writes to, such as running statistics. The tensors share
  // storage with the program's.
  NamedTensors mutated_tensors() const;
  // Copies tensors into the weights. One name of a tied parameter is enough, and non-persistent buffers may be present.
  // Throws ProgramError, which begins with `source` and lists all differences, if names, shapes or dtypes do not match;
  // the weights are unchanged then. Of a model without values some may be missing, which are initialised. Load before you split: the stages of a Pipe have their own copies of parameters
  // that several stages use.
  enum class CopyWhen {
    Now,
    // A tensor is copied when it is first used, so a process copies those of its own stages only. Until then `state`
    // must not change, such as tensors that are mapped from a file.
    WhenUsed,
  };
  void load_state_dict(const NamedTensors& state, const std::string& source = "the state_dict",
                       CopyWhen when = CopyWhen::Now);
  // Writes a copy of the file that the program was read from, with the current weights; torch.export.load reads it.
  // Replaces `path` atomically, once all data is on disk. Throws ProgramError if the program was read from memory, or
  // if its file has changed since.
  void save(const std::string& path) const;

  const Graph& graph() const;
  const std::vector<ProgramInput>& inputs() const;
  const std::vector<ProgramOutput>& outputs() const;
  // Returns the ranges of the symbols in dynamic shapes.
  const std::map<std::string, SymbolRange>& ranges() const;
  // Returns the tensor of an input that is a parameter, a buffer or a constant.
  const at::Tensor& tensor(const ProgramInput& input) const;
  // Returns the path of the file.
  const std::string& name() const;

  // Returns the values of the user inputs, in the order of inputs(). Checks the arguments as run() does.
  std::vector<c10::IValue> flatten_inputs(const Args& args, const Kwargs& kwargs) const;

 private:
  explicit Program(std::shared_ptr<internal::ProgramState> state);
  friend internal::ProgramState& internal::state_of(const Program& program);

  std::shared_ptr<internal::ProgramState> state_;
};

// Returns a function that sets weights as the constructors of PyTorch's modules do: linear layers, convolutions,
// embeddings, normalisations, recurrent layers and attention. For a weight of any other module it throws ProgramError,
// which names both.
InitialValues initial_values_of_modules(const Program& program);

}  // namespace penstock
