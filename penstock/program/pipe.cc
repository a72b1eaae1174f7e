#include "penstock/program/pipe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "penstock/base/index.h"
#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/interpreter/device_export.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/interpreter/subgraph.h"
#include "penstock/program/partition/colocation.h"
#include "penstock/program/partition/partition.h"
#include "penstock/program/partition/pipe_info.h"
#include "penstock/tensor/nested.h"

namespace penstock {

using internal::concat;
using internal::ExportedProgram;
using internal::index;
using internal::StagePartition;
using internal::state_of;
using internal::Subgraph;

namespace {

// Numbers are sent as tensors without dimensions.
c10::IValue as_tensor(c10::IValue value) {
  if (!value.isInt() && !value.isDouble() && !value.isBool()) return value;
  const at::ScalarType dtype = value.isInt() ? at::kLong : value.isDouble() ? at::kDouble : at::kBool;
  return at::scalar_tensor(value.toScalar(), at::TensorOptions(dtype));
}

c10::IValue as_value(const c10::IValue& tensor, ValueKind kind) {
  switch (kind) {
    case ValueKind::Int: return tensor.toTensor().item<std::int64_t>();
    case ValueKind::Float: return tensor.toTensor().item<double>();
    case ValueKind::Bool: return tensor.toTensor().item<bool>();
    default: return tensor;
  }
}

}  // namespace

struct Pipe::State {
  // Indexed by stage.
  std::vector<StagePartition> partitions;
  std::vector<StageModule> modules;
  Wiring wiring{1};
  SharedParameters shared;
  PipeInfo info;
  // Indexed by stage: its parameter or buffer for each of the program's.
  std::vector<std::map<const void*, at::Tensor>> stage_tensors;

  // Returns the tensor that a stage has for one of the program. Constants are shared by all stages.
  at::Tensor tensor_in(int stage, const at::Tensor& original) const {
    const auto found = stage_tensors[index(stage)].find(original.unsafeGetTensorImpl());
    return found == stage_tensors[index(stage)].end() ? original : found->second;
  }
  void make_modules(const Program& program);
  // Loads the tensors of a stage into memory.
  void load(const Program& program, int stage) const;
  // Returns the forward of a stage. `exported` is the program's export, or a copy for another device; `tensor_of`
  // returns the tensor to use for one of the program's.
  std::function<c10::IValue(const Args&, const Kwargs&)> forward_of(
      const Program& program, int stage, const std::shared_ptr<const ExportedProgram>& exported,
      const std::function<at::Tensor(const at::Tensor&)>& tensor_of) const;
};

namespace {

// A parameter or buffer of the program with all its names, and the stages that have it.
struct Weight {
  at::Tensor tensor;
  std::vector<std::string> names = {};
  bool is_parameter = false;
  bool is_mutated = false;
  std::set<int> stages = {};
};

std::vector<Weight> weights_of(const Program& program, const std::vector<StagePartition>& partitions) {
  const std::set<int> mutated = internal::mutated_values(*state_of(program).exported);
  std::vector<Weight> weights;
  for (std::size_t i = 0; i < program.inputs().size(); ++i) {
    const ProgramInput& input = program.inputs()[i];
    if (input.kind != ProgramInput::Kind::Parameter && input.kind != ProgramInput::Kind::Buffer) continue;
    const at::Tensor& tensor = *state_of(program).find_tensor(input);
    auto weight =
        std::find_if(weights.begin(), weights.end(), [&](const Weight& known) { return known.tensor.is_same(tensor); });
    if (weight == weights.end()) weight = weights.insert(weight, {.tensor = tensor});
    weight->names.push_back(input.name);
    weight->is_parameter = weight->is_parameter || input.kind == ProgramInput::Kind::Parameter;
    weight->is_mutated = weight->is_mutated || mutated.contains(input.value);
    for (std::size_t stage = 0; stage < partitions.size(); ++stage) {
      const auto& indices = partitions[stage].weights;
      if (std::ranges::find(indices, static_cast<int>(i)) != indices.end()) {
        weight->stages.insert(static_cast<int>(stage));
      }
    }
  }
  // An unused weight stays in the first stage, so that checkpoints contain it.
  for (Weight& weight : weights) {
    if (weight.stages.empty()) weight.stages.insert(0);
  }
  return weights;
}

}  // namespace

std::function<c10::IValue(const Args&, const Kwargs&)> Pipe::State::forward_of(
    const Program& program, int stage, const std::shared_ptr<const ExportedProgram>& exported,
    const std::function<at::Tensor(const at::Tensor&)>& tensor_of) const {
  const StagePartition& partition = partitions[index(stage)];
  const bool is_last = stage == static_cast<int>(partitions.size()) - 1;
  Subgraph::Contents contents{.nodes = partition.nodes, .inputs = partition.arguments, .inputs_are_given = stage == 0};
  for (const int weight : partition.weights) {
    const ProgramInput& input = program.inputs()[index(weight)];
    contents.weights.emplace_back(input.value, tensor_of(*state_of(program).find_tensor(input)));
  }
  for (const int write : partition.writes) {
    contents.writes.push_back(state_of(program).write_of(program.outputs()[index(write)]));
  }
  if (is_last) {
    for (const ProgramOutput& output : program.outputs()) {
      if (output.kind == ProgramOutput::Kind::User) contents.outputs.push_back(output.operand);
    }
  } else {
    for (const int result : partition.results) contents.outputs.push_back({.value = result});
  }
  std::vector<ValueKind> kinds;
  for (const int argument : partition.arguments) kinds.push_back(program.graph().values[index(argument)].kind);
  const auto subgraph = std::make_shared<const Subgraph>(exported, std::move(contents), state_of(program).mode);
  return [program, subgraph, kinds, stage, is_last](const Args& args, const Kwargs& kwargs) {
    std::vector<c10::IValue> inputs;
    if (stage == 0) {
      inputs = program.flatten_inputs(args, kwargs);
    } else {
      for (std::size_t i = 0; i < args.size(); ++i) inputs.push_back(as_value(args[i], kinds[i]));
    }
    std::vector<c10::IValue> outputs = subgraph->run(std::move(inputs));
    if (is_last) return state_of(program).exported->out_spec.unflatten(outputs);
    std::transform(outputs.begin(), outputs.end(), outputs.begin(), as_tensor);
    return c10::IValue(c10::ivalue::Tuple::create(std::move(outputs)));
  };
}

void Pipe::State::make_modules(const Program& program) {
  const int count = static_cast<int>(partitions.size());
  modules.resize(partitions.size());
  stage_tensors.resize(partitions.size());
  for (const Weight& weight : weights_of(program, partitions)) {
    std::vector<SharedParameter> copies;
    for (const int stage : weight.stages) {
      at::Tensor tensor = weight.tensor;
      if (weight.is_parameter && stage != *weight.stages.begin()) {
        tensor = state_of(program).weights->copy_of(weight.tensor);
      }
      stage_tensors[index(stage)].emplace(weight.tensor.unsafeGetTensorImpl(), tensor);
      StageModule& module = modules[index(stage)];
      (weight.is_parameter ? module.parameters : module.buffers).emplace_back(weight.names.front(), tensor);
      if (!weight.is_parameter && !weight.is_mutated) module.constant_buffers.insert(weight.names.front());
      copies.push_back({.stage = stage, .name = weight.names.front()});
    }
    if (weight.is_parameter && copies.size() > 1) shared.push_back(std::move(copies));
  }
  const std::set<int> mutated = internal::mutated_values(*state_of(program).exported);
  for (int stage = 0; stage < count; ++stage) {
    for (const int weight : partitions[index(stage)].weights) {
      const ProgramInput& input = program.inputs()[index(weight)];
      if (input.kind == ProgramInput::Kind::Buffer || !mutated.contains(input.value)) continue;
      modules[index(stage)].state.emplace_back(input.name, tensor_in(stage, *state_of(program).find_tensor(input)));
    }
    modules[index(stage)].forward = forward_of(program, stage, state_of(program).exported,
                                               [&](const at::Tensor& original) { return tensor_in(stage, original); });
  }
  wiring = Wiring(count);
  for (int stage = 1; stage < count; ++stage) wiring.connect(stage, partitions[index(stage)].sources);
}

void Pipe::State::load(const Program& program, int stage) const {
  internal::Weights& weights = *state_of(program).weights;
  const StageModule& module = modules[index(stage)];
  for (const NamedTensors* tensors : {&module.parameters, &module.buffers}) {
    for (const auto& [name, tensor] : *tensors) weights.load(tensor);
  }
  for (const int weight : partitions[index(stage)].weights) {
    weights.load(tensor_in(stage, *state_of(program).find_tensor(program.inputs()[index(weight)])));
  }
}

Pipe::Pipe(Program program, std::vector<int> stage_of_node, MultiUseParameterConfig multi_use)
    : program_(std::move(program)), stage_of_node_(std::move(stage_of_node)) {
  if (stage_of_node_.size() != program_.graph().nodes.size()) {
    throw ProgramError(concat("found the stages of ", stage_of_node_.size(), " nodes, expected those of the program's ",
                              program_.graph().nodes.size(), "."));
  }
  auto state = std::make_shared<State>();
  state->partitions = partition(*state_of(program_).exported, stage_of_node_,
                                /*transmit=*/multi_use == MultiUseParameterConfig::TRANSMIT);
  state->make_modules(program_);
  state->info = internal::make_pipe_info(program_, stage_of_node_, state->partitions, state->modules, state->wiring);
  state_ = std::move(state);
}

int Pipe::num_stages() const {
  return static_cast<int>(state_->partitions.size());
}

const PipeInfo& Pipe::info() const {
  return state_->info;
}

const Wiring& Pipe::wiring() const {
  return state_->wiring;
}

const SharedParameters& Pipe::shared_parameters() const {
  return state_->shared;
}

std::vector<std::map<int, std::string>> Pipe::replicated_params() const {
  std::vector<std::map<int, std::string>> replicated;
  for (const std::vector<SharedParameter>& copies : shared_parameters()) {
    std::map<int, std::string>& names = replicated.emplace_back();
    for (const SharedParameter& copy : copies) names.emplace(copy.stage, copy.name);
  }
  return replicated;
}

const StageModule& Pipe::get_stage_module(int stage) const {
  if (stage < 0 || stage >= num_stages()) {
    throw ProgramError(concat("there is no stage ", stage, "; the stages are 0 to ", num_stages() - 1, "."));
  }
  state_->load(program_, stage);
  return state_->modules[index(stage)];
}

PipelineStage Pipe::make_stage(int stage, StageOptions options) const {
  StageModule module = get_stage_module(stage);
  if (options.device != at::Device(at::kCPU)) module = stage_module_on(stage, options.device);
  return {std::move(module), stage, num_stages(), std::move(options)};
}

StageModule Pipe::stage_module_on(int stage, at::Device device) const {
  StageModule module = get_stage_module(stage);
  std::map<const void*, at::Tensor> moved;
  for (NamedTensors* tensors : {&module.parameters, &module.buffers, &module.state}) {
    for (auto& [name, tensor] : *tensors) {
      // A parameter that is written to is in two lists.
      if (const auto known = moved.find(tensor.unsafeGetTensorImpl()); known != moved.end()) {
        tensor = known->second;
        continue;
      }
      at::Tensor copy = tensor.detach().to(device).set_requires_grad(tensor.requires_grad());
      moved.emplace(tensor.unsafeGetTensorImpl(), copy);
      tensor = std::move(copy);
    }
  }
  const auto exported = internal::export_on(*state_of(program_).exported, device);
  module.forward = state_->forward_of(program_, stage, exported, [&](const at::Tensor& original) {
    const auto found = moved.find(state_->tensor_in(stage, original).unsafeGetTensorImpl());
    return found == moved.end() ? original.to(device) : found->second;
  });
  return module;
}

StagedModel Pipe::build(at::Device device) const {
  return build([device](int) { return device; });
}

StagedModel Pipe::build(const StageDevices& device_of) const {
  std::vector<int> all(state_->partitions.size());
  std::iota(all.begin(), all.end(), 0);
  return build_stages(all, device_of);
}

StagedModel Pipe::build_stages(std::span<const int> stages, at::Device device) const {
  return build_stages(stages, [device](int) { return device; });
}

StagedModel Pipe::build_stages(std::span<const int> stages, const StageDevices& device_of) const {
  std::vector<PipelineStage> made;
  for (const int stage : stages) made.push_back(make_stage(stage, {.device = device_of(stage)}));
  return {std::move(made), wiring(), shared_parameters()};
}

StagedModel Pipe::build_stage(int stage, StageOptions options) const {
  std::vector<PipelineStage> made;
  made.push_back(make_stage(stage, std::move(options)));
  return {std::move(made), wiring(), shared_parameters()};
}

c10::IValue Pipe::run(const Args& args, const Kwargs& kwargs) const {
  std::vector<std::vector<c10::IValue>> outputs;
  for (int stage = 0; stage < num_stages(); ++stage) {
    Args received;
    for (const StageOutput& source : state_->partitions[index(stage)].sources) {
      received.push_back(outputs[index(source.stage)][index(source.output)]);
    }
    const c10::IValue output =
        get_stage_module(stage).forward(stage == 0 ? args : received, stage == 0 ? kwargs : Kwargs());
    if (stage == num_stages() - 1) return output;
    outputs.push_back(output.toTupleRef().elements().vec());
  }
  return {};
}

NamedTensors Pipe::state_dict(int stage) const {
  NamedTensors state;
  const StageModule& module = get_stage_module(stage);
  std::map<std::string, at::Tensor> tensors(module.parameters.begin(), module.parameters.end());
  tensors.insert(module.buffers.begin(), module.buffers.end());
  for (const Weight& weight : weights_of(program_, state_->partitions)) {
    if (!weight.stages.contains(stage)) continue;
    for (const std::string& name : weight.names) {
      const auto input = std::find_if(program_.inputs().begin(), program_.inputs().end(),
                                      [&](const ProgramInput& candidate) { return candidate.name == name; });
      if (input->persistent) state.emplace_back(name, tensors.at(weight.names.front()));
    }
  }
  return state;
}

void Pipe::load_state_dict(int stage, const NamedTensors& state) const {
  std::map<std::string, at::Tensor> given(state.begin(), state.end());
  const NamedTensors current = state_dict(stage);
  for (const auto& [name, tensor] : current) {
    const auto found = given.find(name);
    if (found == given.end()) throw ProgramError(concat("stage ", stage, ": '", name, "' is missing."));
    if (found->second.sizes() != tensor.sizes()) {
      throw ProgramError(concat("stage ", stage, ": '", name, "': found ", describe(found->second), ", expected ",
                                describe(tensor), "."));
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : current) tensor.copy_(given.at(name));
}

Pipe pipeline(const Program& program, const SplitSpec& split_spec) {
  return {program, split_at(program, split_spec)};
}

Pipe pipeline(const Program& program, int stages) {
  return {program, split_evenly(program, stages, estimated_costs(program))};
}

Pipe pipeline(const Program& program, const std::function<int(const Node& node)>& stage_of) {
  return {program, split_by(program, stage_of)};
}

}  // namespace penstock
