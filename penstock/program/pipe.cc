#include "penstock/program/pipe.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <iomanip>
#include <iterator>
#include <limits>
#include <numeric>
#include <ostream>
#include <set>
#include <sstream>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/interpreter/subgraph.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

std::size_t index(int number) {
  return static_cast<std::size_t>(number);
}

// Numbers travel as tensors of one element.
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

std::string type_text(const Value& value) {
  switch (value.kind) {
    case ValueKind::Int: return "int";
    case ValueKind::Float: return "float";
    case ValueKind::Bool: return "bool";
    default: return value.type ? to_string(*value.type) : "tensor";
  }
}

// The outermost modules that lie in a stage as a whole, and otherwise the innermost that have a part in it.
std::vector<std::string> modules_of(const Graph& graph, const std::vector<int>& stages, int stage) {
  // By call: whether all of it is in one stage.
  std::vector<bool> whole(graph.calls.size(), true);
  std::vector<int> home(graph.calls.size(), -1);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    for (int call = graph.nodes[i].call; call >= 0; call = graph.calls[index(call)].parent) {
      if (home[index(call)] < 0) home[index(call)] = stages[i];
      if (home[index(call)] != stages[i]) whole[index(call)] = false;
    }
  }
  std::vector<std::string> modules;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (stages[i] != stage || graph.nodes[i].call < 0) continue;
    int chosen = graph.nodes[i].call;
    bool is_whole = whole[index(chosen)];
    for (int call = graph.nodes[i].call; call >= 0; call = graph.calls[index(call)].parent) {
      if (!whole[index(call)] || graph.calls[index(call)].path.empty()) break;
      chosen = call;
      is_whole = true;
    }
    const std::string& path = graph.calls[index(chosen)].path;
    // Between modules the model computes something itself.
    if (path.empty()) continue;
    std::string name = is_whole ? path : "part of " + path;
    if (std::find(modules.begin(), modules.end(), name) == modules.end()) modules.push_back(std::move(name));
  }
  return modules;
}

// "2.99 k" and the like: with the space that a unit wants.
std::string amount(double number) {
  constexpr std::array<const char*, 5> kPrefixes{"", "k", "M", "G", "T"};
  std::size_t prefix = 0;
  while (number >= 999.5 && prefix + 1 < kPrefixes.size()) {
    number /= 1000;
    ++prefix;
  }
  std::ostringstream text;
  text << std::setprecision(3) << number << " " << kPrefixes[prefix];
  return std::move(text).str();
}

}  // namespace

struct Pipe::State {
  std::vector<StagePart> parts;
  std::vector<StageModule> modules;
  Wiring wiring{1};
  SharedParameters shared;
  PipeInfo info;
  // By stage and the program's tensor: its own.
  std::vector<std::map<const void*, at::Tensor>> own;

  // What a stage has for a tensor of the program: a constant is everybody's.
  at::Tensor held_by(int stage, const at::Tensor& original) const {
    const auto found = own[index(stage)].find(original.unsafeGetTensorImpl());
    return found == own[index(stage)].end() ? original : found->second;
  }
  void make_modules(const Program& program);
  // What a stage computes, by an export like the program's, on the weights that `tensor_of` gives for the program's.
  std::function<c10::IValue(const Args&, const Kwargs&)> forward_of(
      const Program& program, int stage, const std::shared_ptr<const Exported>& exported,
      const std::function<at::Tensor(const at::Tensor&)>& tensor_of) const;
  void make_info(const Program& program, const std::vector<int>& stages);
};

namespace {

// A tensor of the program under all its names, and the stages that hold it.
struct Weight {
  at::Tensor tensor;
  std::vector<std::string> names = {};
  bool is_parameter = false;
  std::set<int> stages = {};
};

std::vector<Weight> weights_of(const Program& program, const std::vector<StagePart>& parts) {
  std::vector<Weight> weights;
  for (std::size_t i = 0; i < program.inputs().size(); ++i) {
    const ProgramInput& input = program.inputs()[i];
    if (input.kind != ProgramInput::Kind::Parameter && input.kind != ProgramInput::Kind::Buffer) continue;
    const at::Tensor& tensor = program.tensor(input);
    auto weight =
        std::find_if(weights.begin(), weights.end(), [&](const Weight& one) { return one.tensor.is_same(tensor); });
    if (weight == weights.end()) weight = weights.insert(weight, {.tensor = tensor});
    weight->names.push_back(input.name);
    weight->is_parameter = weight->is_parameter || input.kind == ProgramInput::Kind::Parameter;
    for (std::size_t stage = 0; stage < parts.size(); ++stage) {
      const auto& held = parts[stage].held;
      if (std::find(held.begin(), held.end(), static_cast<int>(i)) != held.end()) {
        weight->stages.insert(static_cast<int>(stage));
      }
    }
  }
  // What nobody uses stays with the first stage, so that a checkpoint has it.
  for (Weight& weight : weights) {
    if (weight.stages.empty()) weight.stages.insert(0);
  }
  return weights;
}

// As sizes do, a sum stays at the largest number where it would go beyond it.
void add(std::int64_t more, std::int64_t& sum) {
  if (__builtin_add_overflow(sum, more, &sum)) sum = std::numeric_limits<std::int64_t>::max();
}

}  // namespace

std::function<c10::IValue(const Args&, const Kwargs&)> Pipe::State::forward_of(
    const Program& program, int stage, const std::shared_ptr<const Exported>& exported,
    const std::function<at::Tensor(const at::Tensor&)>& tensor_of) const {
  const StagePart& part = parts[index(stage)];
  const bool is_last = stage == static_cast<int>(parts.size()) - 1;
  Part::Contents contents{.nodes = part.nodes, .inputs = part.arguments, .inputs_are_given = stage == 0};
  for (const int held : part.held) {
    const ProgramInput& input = program.inputs()[index(held)];
    contents.held.emplace_back(input.value, tensor_of(program.tensor(input)));
  }
  for (const int write : part.writes) {
    contents.writes.push_back(program.state()->write_of(program.outputs()[index(write)]));
  }
  if (is_last) {
    for (const ProgramOutput& output : program.outputs()) {
      if (output.kind == ProgramOutput::Kind::User) contents.outputs.push_back(output.operand);
    }
  } else {
    for (const int result : part.results) contents.outputs.push_back({.value = result});
  }
  std::vector<ValueKind> kinds;
  for (const int argument : part.arguments) kinds.push_back(program.graph().values[index(argument)].kind);
  const auto code = std::make_shared<const Part>(exported, std::move(contents), program.state()->mode);
  return [program, code, kinds, stage, is_last](const Args& args, const Kwargs& kwargs) {
    std::vector<c10::IValue> inputs;
    if (stage == 0) {
      inputs = program.flatten_inputs(args, kwargs);
    } else {
      for (std::size_t i = 0; i < args.size(); ++i) inputs.push_back(as_value(args[i], kinds[i]));
    }
    std::vector<c10::IValue> outputs = code->run(std::move(inputs));
    if (is_last) return program.out_spec().unflatten(outputs);
    std::transform(outputs.begin(), outputs.end(), outputs.begin(), as_tensor);
    return c10::IValue(c10::ivalue::Tuple::create(std::move(outputs)));
  };
}

void Pipe::State::make_modules(const Program& program) {
  const int count = static_cast<int>(parts.size());
  modules.resize(parts.size());
  own.resize(parts.size());
  for (const Weight& weight : weights_of(program, parts)) {
    std::vector<SharedParameter> places;
    std::map<int, std::string> replicated;
    for (const int stage : weight.stages) {
      at::Tensor tensor = weight.tensor;
      if (weight.is_parameter && stage != *weight.stages.begin()) {
        tensor = weight.tensor.detach().clone().set_requires_grad(weight.tensor.requires_grad());
      }
      own[index(stage)].emplace(weight.tensor.unsafeGetTensorImpl(), tensor);
      StageModule& module = modules[index(stage)];
      (weight.is_parameter ? module.parameters : module.buffers).emplace_back(weight.names.front(), tensor);
      places.push_back({.stage = stage, .name = weight.names.front()});
      replicated.emplace(stage, weight.names.front());
    }
    if (weight.is_parameter && places.size() > 1) {
      shared.push_back(std::move(places));
      info.replicated_params.push_back(std::move(replicated));
    }
  }
  for (int stage = 0; stage < count; ++stage) {
    modules[index(stage)].forward = forward_of(program, stage, program.state()->exported,
                                               [&](const at::Tensor& original) { return held_by(stage, original); });
  }
  wiring = Wiring(count);
  for (int stage = 1; stage < count; ++stage) wiring.connect(stage, parts[index(stage)].sources);
}

void Pipe::State::make_info(const Program& program, const std::vector<int>& stages) {
  const Graph& graph = program.graph();
  const std::vector<NodeCost> costs = estimated_costs(program);
  const Effects& effects = program.state()->exported->effects;
  info.name = program.name();
  for (int stage = 0; stage < static_cast<int>(parts.size()); ++stage) {
    const StagePart& part = parts[index(stage)];
    PipeInfo::Stage one{.modules = modules_of(graph, stages, stage), .nodes = static_cast<int>(part.nodes.size())};
    for (const auto& [name, tensor] : modules[index(stage)].parameters) add(tensor.numel(), one.parameters);
    for (const auto& [name, tensor] : modules[index(stage)].buffers) add(tensor.numel(), one.buffers);
    for (const int number : part.nodes) {
      one.flops += costs[index(number)].flops;
      one.seconds += costs[index(number)].seconds;
      for_each_result(graph.nodes[index(number)], [&](int value) {
        const auto& type = graph.values[index(value)].type;
        if (type && effects.view_of[index(value)] < 0) add(type->bytes(), one.kept_bytes);
      });
    }
    info.stages.push_back(std::move(one));
  }
  for (const Wiring::Link& link : wiring.links()) {
    if (!link.values) continue;
    for (const StageOutput& output : *link.values) {
      const Value& value = graph.values[index(parts[index(output.stage)].results[index(output.output)])];
      info.crossings.push_back({.name = value.name,
                                .from = link.from,
                                .to = link.to,
                                .type = type_text(value),
                                .bytes = value.type ? value.type->bytes() : 8});
    }
  }
}

Pipe::Pipe(Program program, std::vector<int> stage_of_node, MultiUseParameterConfig multi_use)
    : program_(std::move(program)), stage_of_node_(std::move(stage_of_node)) {
  if (stage_of_node_.size() != program_.graph().nodes.size()) {
    throw ProgramError("there are stages for " + std::to_string(stage_of_node_.size()) +
                       " nodes, and the program has " + std::to_string(program_.graph().nodes.size()) + ".");
  }
  auto state = std::make_shared<State>();
  state->parts = partition(*program_.state()->exported, stage_of_node_,
                           /*transmit=*/multi_use == MultiUseParameterConfig::TRANSMIT);
  state->make_modules(program_);
  state->make_info(program_, stage_of_node_);
  state_ = std::move(state);
}

int Pipe::num_stages() const {
  return static_cast<int>(state_->parts.size());
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

const StageModule& Pipe::get_stage_module(int stage) const {
  if (stage < 0 || stage >= num_stages()) {
    throw ProgramError("there is no stage " + std::to_string(stage) + " of " + std::to_string(num_stages()) +
                       "; they go from 0 to " + std::to_string(num_stages() - 1) + ".");
  }
  return state_->modules[index(stage)];
}

PipelineStage Pipe::make_stage(int stage, StageOptions options) const {
  StageModule module = get_stage_module(stage);
  if (options.device != at::Device(at::kCPU)) module = module_on(stage, options.device);
  return {std::move(module), stage, num_stages(), std::move(options)};
}

StageModule Pipe::module_on(int stage, at::Device device) const {
  StageModule module = get_stage_module(stage);
  std::map<const void*, at::Tensor> moved;
  for (NamedTensors* tensors : {&module.parameters, &module.buffers}) {
    for (auto& [name, tensor] : *tensors) {
      at::Tensor there = tensor.detach().to(device).set_requires_grad(tensor.requires_grad());
      moved.emplace(tensor.unsafeGetTensorImpl(), there);
      tensor = std::move(there);
    }
  }
  // Nodes that make tensors make them there, too.
  const auto exported = std::make_shared<Exported>(*program_.state()->exported);
  for (Node& node : exported->graph.nodes) {
    for (Operand& operand : node.operands) {
      if (operand.is_constant() && operand.constant.isDevice()) operand.constant = device;
    }
  }
  module.forward = state_->forward_of(program_, stage, exported, [&](const at::Tensor& original) {
    const auto found = moved.find(state_->held_by(stage, original).unsafeGetTensorImpl());
    return found == moved.end() ? original.to(device) : found->second;
  });
  return module;
}

StagedModel Pipe::build(at::Device device) const {
  std::vector<int> all(state_->parts.size());
  std::iota(all.begin(), all.end(), 0);
  return build_stages(all, device);
}

StagedModel Pipe::build_stages(std::span<const int> stages, at::Device device) const {
  std::vector<PipelineStage> made;
  for (const int stage : stages) made.push_back(make_stage(stage, {.device = device}));
  return {std::move(made), wiring(), shared_parameters()};
}

StagedModel Pipe::build_stage(int stage, StageOptions options) const {
  std::vector<PipelineStage> made;
  made.push_back(make_stage(stage, std::move(options)));
  return {std::move(made), wiring(), shared_parameters()};
}

c10::IValue Pipe::run(const Args& args, const Kwargs& kwargs) const {
  std::vector<std::vector<c10::IValue>> given;
  for (int stage = 0; stage < num_stages(); ++stage) {
    Args own;
    for (const StageOutput& source : state_->parts[index(stage)].sources) {
      own.push_back(given[index(source.stage)][index(source.output)]);
    }
    const c10::IValue output =
        state_->modules[index(stage)].forward(stage == 0 ? args : own, stage == 0 ? kwargs : Kwargs());
    if (stage == num_stages() - 1) return output;
    given.push_back(output.toTupleRef().elements().vec());
  }
  return {};
}

NamedTensors Pipe::state_dict(int stage) const {
  get_stage_module(stage);
  NamedTensors state;
  const StageModule& module = get_stage_module(stage);
  std::map<std::string, at::Tensor> own(module.parameters.begin(), module.parameters.end());
  own.insert(module.buffers.begin(), module.buffers.end());
  for (const Weight& weight : weights_of(program_, state_->parts)) {
    if (!weight.stages.contains(stage)) continue;
    for (const std::string& name : weight.names) {
      const auto input = std::find_if(program_.inputs().begin(), program_.inputs().end(),
                                      [&](const ProgramInput& one) { return one.name == name; });
      if (input->persistent) state.emplace_back(name, own.at(weight.names.front()));
    }
  }
  return state;
}

void Pipe::load_state_dict(int stage, const NamedTensors& state) const {
  std::map<std::string, at::Tensor> given(state.begin(), state.end());
  const NamedTensors own = state_dict(stage);
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end()) throw ProgramError("stage " + std::to_string(stage) + ": '" + name + "' is missing.");
    if (found->second.sizes() != tensor.sizes()) {
      throw ProgramError("stage " + std::to_string(stage) + ": '" + name + "': found " + describe(found->second) +
                         ", expected " + describe(tensor) + ".");
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) tensor.copy_(given.at(name));
}

std::string figures_of(const PipeInfo::Stage& stage) {
  std::string parameters = amount(static_cast<double>(stage.parameters));
  if (!parameters.ends_with(' ')) parameters += " ";
  return parameters + "parameters, " + amount(stage.flops) + "FLOP a forward, " +
         amount(static_cast<double>(stage.kept_bytes)) + "B kept";
}

std::ostream& operator<<(std::ostream& out, const Pipe& pipe) {
  const PipeInfo& info = pipe.info();
  out << info.name << ": " << info.stages.size() << (info.stages.size() == 1 ? " stage" : " stages") << "\n";
  for (std::size_t i = 0; i < info.stages.size(); ++i) {
    const PipeInfo::Stage& stage = info.stages[i];
    out << "  stage " << i << ": ";
    for (std::size_t k = 0; k < stage.modules.size(); ++k) out << (k == 0 ? "" : ", ") << stage.modules[k];
    if (stage.modules.empty())
      out << stage.nodes << (stage.nodes == 1 ? " operation" : " operations") << " of the model itself";
    out << "\n    " << figures_of(stage) << "\n";
    for (const PipeInfo::Crossing& crossing : info.crossings) {
      if (crossing.from != static_cast<int>(i)) continue;
      out << "    -> stage " << crossing.to << ": " << crossing.name << " " << crossing.type << "\n";
    }
  }
  for (const std::map<int, std::string>& shared : info.replicated_params) {
    out << "  shared: " << shared.begin()->second << " by stages";
    for (const auto& [stage, name] : shared) out << (stage == shared.begin()->first ? " " : ", ") << stage;
    out << "\n";
  }
  return out;
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
