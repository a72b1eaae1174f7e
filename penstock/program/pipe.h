// A Pipe is a program in stages, ready for a Pipeline:
//
//   Pipe pipe = pipeline(Program("gpt.pt2"), {{"blocks.2", SplitPoint::BEGINNING}, {"blocks.4", SplitPoint::BEGINNING}});
//   std::cout << pipe;                                    // stages, modules, parameters, and what crosses
//   Pipeline run(pipe.build(), schedule, {.loss = loss});
//
// Names of parameters and buffers are the model's own.
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
#include "penstock/program/partition/partition.h"
#include "penstock/program/program.h"
#include "penstock/program/split.h"
#include "penstock/stage/shared.h"
#include "penstock/stage/stage.h"
#include "penstock/stage/staged_model.h"
#include "penstock/stage/wiring.h"
#include "penstock/tensor/named_tensors.h"

namespace penstock {

// What a parameter becomes that several stages use: each has it, and gradients are summed over them; or the first has it
// and sends it to the others with the activations.
enum class MultiUseParameterConfig { TRANSMIT, REPLICATE };

struct PipeInfo {
  // A value on its way from one stage to another.
  struct Crossing {
    std::string name;
    int from = 0;
    int to = 0;
    // "float32[s77, 16]", or "int".
    std::string type;
    std::int64_t bytes = 0;
  };
  struct Stage {
    // The modules that it runs, outermost: what is a whole module is not named by its parts.
    std::vector<std::string> modules;
    int nodes = 0;
    // Numbers of elements.
    std::int64_t parameters = 0;
    std::int64_t buffers = 0;
    // Of a microbatch with the example's sizes: floating-point operations of the forward, estimated seconds of forward
    // and backward, and bytes that the forward keeps for the backward.
    double flops = 0;
    double seconds = 0;
    std::int64_t kept_bytes = 0;
  };
  std::string name;
  std::vector<Stage> stages;
  std::vector<Crossing> crossings;
  // Parameters that several stages have: their name, by stage.
  std::vector<std::map<int, std::string>> replicated_params;
};

class Pipe {
 public:
  Pipe(Program program, std::vector<int> stage_of_node,
       MultiUseParameterConfig multi_use = MultiUseParameterConfig::REPLICATE);

  int num_stages() const;
  const PipeInfo& info() const;
  const Program& program() const { return program_; }
  // By node of the program.
  const std::vector<int>& stages() const { return stage_of_node_; }

  // Returns a stage as a module. Its parameters are the program's own tensors; of a parameter that several stages have,
  // the first stage has the program's tensor and each later one a copy. Throws ProgramError if there is no such stage.
  const StageModule& get_stage_module(int stage) const;

  // Returns the model for a Pipeline: all stages, with their wiring and the parameters that they share. On a device other
  // than the CPU, parameters and buffers are copies.
  StagedModel build(at::Device device = at::kCPU) const;
  // Returns the same model with the given stages only, in ascending order: those of one process rank, such as
  // schedule.placement().stages_of(rank). Throws ProgramError if there is no such stage.
  StagedModel build_stages(std::span<const int> stages, at::Device device = at::kCPU) const;
  // Returns the same model with one stage only, for a process rank that runs one.
  StagedModel build_stage(int stage, StageOptions options = {}) const;

  // How the stages are connected, and which parameters they share; build() passes both on.
  const Wiring& wiring() const;
  const SharedParameters& shared_parameters() const;
  const std::vector<std::map<int, std::string>>& replicated_params() const { return info().replicated_params; }

  // Runs the stages one after the other in this thread.
  c10::IValue run(const Args& args, const Kwargs& kwargs = {}) const;

  // See Program; holds for all stages, those that have been built too.
  void train() { program_.train(); }
  void eval() { program_.eval(); }

  // The parameters and persistent buffers of a stage under all the names that the model has for them, and back.
  NamedTensors state_dict(int stage) const;
  void load_state_dict(int stage, const NamedTensors& state) const;

 private:
  struct State;
  StageModule module_on(int stage, at::Device device) const;
  PipelineStage make_stage(int stage, StageOptions options) const;

  Program program_;
  std::vector<int> stage_of_node_;
  std::shared_ptr<const State> state_;
};

// "2.99 k parameters, 56 kFLOP a forward, 15 kB kept".
std::string figures_of(const PipeInfo::Stage& stage);
// Stages, modules, parameters, operations, bytes kept, and what crosses.
std::ostream& operator<<(std::ostream& out, const Pipe& pipe);

// At modules and at the model's own marks; into a number of stages; by a function of nodes.
Pipe pipeline(const Program& program, const SplitSpec& split_spec = {});
Pipe pipeline(const Program& program, int stages);
Pipe pipeline(const Program& program, const std::function<int(const Node& node)>& stage_of);

}  // namespace penstock
