// A Pipe is a program that is split into stages, ready for a Pipeline:
//
//   Pipe pipe = pipeline(Program("gpt.pt2"), {{"blocks.2", SplitPoint::BEGINNING}, {"blocks.4", SplitPoint::END}});
//   std::cout << pipe;                                    // stages, modules, parameters and boundary values
//   Pipeline run(pipe.build(), schedule, {.loss = loss});
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "penstock/program/costs.h"
#include "penstock/program/graph.h"
#include "penstock/program/program.h"
#include "penstock/program/split.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

// Handling of a parameter that several stages use. TRANSMIT: the first of them owns it and sends it to the others
// with the activations. REPLICATE: each has a copy, and the gradients are summed over the copies.
enum class MultiUseParameterConfig { TRANSMIT, REPLICATE };

// Statistics of a Pipe, for people and tools. Costs are estimates for a microbatch of the export's example sizes.
struct PipeInfo {
  // A value that one stage sends to another.
  struct BoundaryValue {
    std::string name;
    int from = 0;
    int to = 0;
    // "float32[s77, 16]", or "int".
    std::string type;
    std::int64_t bytes = 0;
  };
  struct Stage {
    // Modules that the stage runs. A module that is in the stage as a whole is listed without its submodules.
    std::vector<std::string> modules;
    int nodes = 0;
    // Numbers of elements.
    std::int64_t parameters = 0;
    std::int64_t buffers = 0;
    // Bytes of the parameters, and of the gradients of those that have some.
    std::int64_t parameter_bytes = 0;
    std::int64_t gradient_bytes = 0;
    // Bytes of the buffers by name. Stages of one process share a buffer that several of them use.
    std::map<std::string, std::int64_t> buffer_bytes = {};
    // Floating-point operations of the forward.
    double flops = 0;
    // Seconds of forward and backward.
    double seconds = 0;
    // Bytes of activations that the forward saves for the backward.
    std::int64_t saved_activation_bytes = 0;
  };
  // Path of the program.
  std::string name;
  std::vector<Stage> stages;
  std::vector<BoundaryValue> boundary_values;
};

// Returns the device of a stage.
using StageDevices = std::function<at::Device(int stage)>;

// A Program and its partition into stages. Parameters and buffers have the model's names. Copies share the stages. The
// const functions may be called from any number of threads, like those of Program. Functions throw ProgramError.
class Pipe {
 public:
  // `stage_of_node` has the stage of each node of the program, numbered from 0 without gaps: see split.h. Throws
  // ProgramError if the program cannot be split so; the error names the node or the buffer and both stages.
  Pipe(Program program, std::vector<int> stage_of_node,
       MultiUseParameterConfig multi_use = MultiUseParameterConfig::REPLICATE);

  int num_stages() const;
  const PipeInfo& info() const;
  const Program& program() const { return program_; }
  // Returns the stage of each node of the program.
  const std::vector<int>& stages() const { return stage_of_node_; }

  // Returns a stage as a module, with its weights in memory. Its parameters share storage with the program's, but of a
  // parameter that several stages use, each stage after the first has a copy. Throws ProgramError if there is no such
  // stage.
  const StageModule& get_stage_module(int stage) const;
  // Returns a stage as a module whose parameters, buffers and constants are copies on a device, in the same order.
  StageModule stage_module_on(int stage, at::Device device) const;

  // Returns the model for a Pipeline: all stages, with their wiring and the parameters that they share. On a device
  // other than the CPU, parameters and buffers are copies.
  StagedModel build(at::Device device = at::kCPU) const;
  StagedModel build(const StageDevices& device_of) const;
  // Returns the same model with the given stages only, in ascending order: those of one process rank, such as
  // schedule.placement().stages_of(rank). Throws ProgramError if there is no such stage.
  StagedModel build_stages(std::span<const int> stages, at::Device device = at::kCPU) const;
  StagedModel build_stages(std::span<const int> stages, const StageDevices& device_of) const;
  // Returns the same model with one stage only, for a process rank that runs one.
  StagedModel build_stage(int stage, StageOptions options = {}) const;

  // Returns the connections between the stages, which build() includes.
  const Wiring& wiring() const;
  // Returns the parameters that several stages have, which build() includes.
  const SharedParameters& shared_parameters() const;
  // Returns the same as PyTorch's Pipe does: for each shared parameter, its name in each stage.
  std::vector<std::map<int, std::string>> replicated_params() const;

  // Runs the stages one after the other in this thread and returns the output of the last.
  c10::IValue run(const Args& args, const Kwargs& kwargs = {}) const;

  // Select the mode of the program, and with it of all stages, including those that have been built.
  void train() { program_.train(); }
  void eval() { program_.eval(); }

  // Returns the parameters and persistent buffers of a stage, under all the names that the model has for them.
  NamedTensors state_dict(int stage) const;
  // Copies tensors into a stage. Throws ProgramError for a missing name or another shape; the stage is unchanged then.
  void load_state_dict(int stage, const NamedTensors& state) const;

 private:
  struct State;
  PipelineStage make_stage(int stage, StageOptions options) const;

  Program program_;
  std::vector<int> stage_of_node_;
  std::shared_ptr<const State> state_;
};

// Returns "2.99 k parameters, 56 kFLOP a forward, 15 kB of saved activations".
std::string statistics_text(const PipeInfo::Stage& stage);
// Prints the stages with their modules, statistics and boundary values, and the shared parameters.
std::ostream& operator<<(std::ostream& out, const Pipe& pipe);

// Splits a program at modules and at the model's pipe_split() calls: see split_at.
Pipe pipeline(const Program& program, const SplitSpec& split_spec = {});
// Splits a program into stages of about equal estimated time: see split_evenly.
Pipe pipeline(const Program& program, int stages);
// Splits a program by a function from a node to its stage: see split_by.
Pipe pipeline(const Program& program, const std::function<int(const Node& node)>& stage_of);

}  // namespace penstock
