#include "penstock/program/interpreter/program_state.h"

#include <ATen/ops/clone.h>

#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "penstock/base/text.h"
#include "penstock/program/interpreter/device_export.h"
#include "penstock/program/interpreter/initial_values.h"
#include "penstock/program/interpreter/mode.h"
#include "penstock/program/partition/colocation.h"

namespace penstock::internal {
namespace {

// Returns the whole program as a subgraph, on the weights that `tensor_of` returns.
template <class TensorOf>
std::shared_ptr<const Subgraph> whole_of(const ProgramState& state,
                                         const std::shared_ptr<const ExportedProgram>& exported,
                                         std::shared_ptr<const Interpreter::Mode> mode, TensorOf tensor_of) {
  Subgraph::Contents contents;
  contents.inputs_are_given = true;
  contents.nodes.resize(state.exported->graph.nodes.size());
  std::iota(contents.nodes.begin(), contents.nodes.end(), 0);
  for (const ProgramInput& input : state.exported->inputs) {
    if (input.kind == ProgramInput::Kind::User) contents.inputs.push_back(input.value);
    if (state.find_tensor(input) != nullptr) contents.weights.emplace_back(input.value, tensor_of(input));
  }
  for (const ProgramOutput& output : state.exported->outputs) {
    if (output.kind == ProgramOutput::Kind::User) {
      contents.outputs.push_back(output.operand);
    } else {
      contents.writes.push_back(state.write_of(output));
    }
  }
  return std::make_shared<Subgraph>(exported, std::move(contents), std::move(mode));
}

// Throws ProgramError if a mutated tensor shares storage with another one. A stage works on copies of what it mutates,
// so the other tensor would not see the write.
void refuse_mutated_aliases(const ProgramState& state) {
  const std::set<int> mutated = mutated_values(*state.exported);
  for (const ProgramInput& input : state.exported->inputs) {
    if (!mutated.contains(input.value)) continue;
    const at::Tensor& tensor = *state.find_tensor(input);
    for (const ProgramInput& other : state.exported->inputs) {
      const at::Tensor* const view = state.find_tensor(other);
      if (view == nullptr || view->is_same(tensor) || !view->is_alias_of(tensor)) continue;
      throw ProgramError(concat(state.name, ": '", input.name, "' is mutated and shares storage with '", other.name,
                                "'; a mutated tensor needs storage of its own."));
    }
  }
}

// Without values, tied parameters cannot be told by their bytes. An export has an input for each name of one and uses the
// last, so a parameter that nothing uses is tied to the one of the same type that its module uses in its place.
void tie_parameters_without_values(ProgramState& state) {
  if (!state.weights->lacks_values()) return;
  const Graph& graph = state.exported->graph;
  const auto module_of = [](const std::string& name) { return WeightName(name).module; };
  std::set<int> used;
  std::map<std::string, std::set<int>> used_by_module;
  for (const Node& node : graph.nodes) {
    for_each_operand_value(node, [&](int value) {
      used.insert(value);
      if (node.call >= 0) used_by_module[graph.calls[static_cast<std::size_t>(node.call)].path].insert(value);
    });
  }
  for (const ProgramInput& input : state.exported->inputs) {
    if (input.kind != ProgramInput::Kind::Parameter || used.contains(input.value)) continue;
    const at::Tensor& unused = *state.find_tensor(input);
    std::vector<std::string> candidates;
    for (const ProgramInput& other : state.exported->inputs) {
      if (other.kind != ProgramInput::Kind::Parameter || module_of(other.name) == module_of(input.name)) continue;
      if (!used_by_module[module_of(input.name)].contains(other.value)) continue;
      const at::Tensor& tensor = *state.find_tensor(other);
      if (tensor.sizes() == unused.sizes() && tensor.scalar_type() == unused.scalar_type()) {
        candidates.push_back(other.name);
      }
    }
    // The first name of a tied parameter determines its initial values, as in a module that is constructed.
    if (candidates.size() == 1) state.weights->tie(candidates.front(), input.name);
  }
}

}  // namespace

const at::Tensor* ProgramState::find_tensor(const ProgramInput& input) const {
  switch (input.kind) {
    case ProgramInput::Kind::Parameter:
    case ProgramInput::Kind::Buffer:
    case ProgramInput::Kind::Constant: return &weights->by_name().at(input.name);
    default: return nullptr;
  }
}

std::shared_ptr<const Subgraph> ProgramState::subgraph_on_copies(
    std::shared_ptr<const Interpreter::Mode> other_mode) const {
  weights->load_all();
  return whole_of(*this, exported, std::move(other_mode), [&](const ProgramInput& input) {
    const at::Tensor& tensor = *find_tensor(input);
    return input.kind == ProgramInput::Kind::Buffer ? tensor.clone() : tensor;
  });
}

std::shared_ptr<const Subgraph> ProgramState::subgraph_on(
    at::Device device, std::shared_ptr<const Interpreter::Mode> other_mode,
    const std::function<at::Tensor(const at::Tensor&)>& tensor_of) const {
  weights->load_all();
  return whole_of(*this, device.is_cpu() ? exported : export_on(*exported, device), std::move(other_mode),
                  [&](const ProgramInput& input) { return tensor_of(*find_tensor(input)); });
}

Subgraph::Write ProgramState::write_of(const ProgramOutput& output) const {
  Subgraph::Write write{.operand = output.operand};
  int user = 0;
  for (const ProgramInput& input : exported->inputs) {
    const bool is_user = input.kind == ProgramInput::Kind::User;
    if (input.name == output.target) {
      if (is_user) {
        write.input = user;
      } else {
        write.value = input.value;
      }
    }
    if (is_user) ++user;
  }
  write.in_training_only = output.kind == ProgramOutput::Kind::Buffer && counts_batches(output.target);
  return write;
}

c10::IValue ProgramState::scalar_argument(const ProgramInput& input, const c10::IValue& given) const {
  const Value& value = exported->graph.values[static_cast<std::size_t>(input.value)];
  const bool takes_number = value.kind == ValueKind::Tensor && value.type && value.type->sizes.empty();
  const bool is_row = given.isTensor() && given.toTensor().defined() && given.toTensor().dim() == 1;
  return takes_number && is_row && given.toTensor().numel() == 1 ? c10::IValue(given.toTensor()[0]) : given;
}

NamedTensors ProgramState::tensors_of(ProgramInput::Kind kind) const {
  NamedTensors tensors;
  for (const ProgramInput& input : exported->inputs) {
    if (input.kind == kind) tensors.emplace_back(input.name, *find_tensor(input));
  }
  return tensors;
}

std::vector<ModelTensor> ProgramState::model_tensors() const {
  std::vector<ModelTensor> tensors;
  std::map<const void*, std::size_t> indices;
  for (const ProgramInput& input : exported->inputs) {
    if (input.kind != ProgramInput::Kind::Parameter && input.kind != ProgramInput::Kind::Buffer) continue;
    const at::Tensor& tensor = *find_tensor(input);
    const auto [index, is_new] = indices.emplace(tensor.unsafeGetTensorImpl(), tensors.size());
    if (is_new) tensors.push_back({.names = {}, .tensor = tensor, .is_required = false});
    ModelTensor& model_tensor = tensors[index->second];
    model_tensor.names.push_back(input.name);
    model_tensor.is_required = model_tensor.is_required || input.persistent;
  }
  return tensors;
}

std::shared_ptr<ProgramState> read_program_state(const std::shared_ptr<const Archive>& archive,
                                                 const ProgramOptions& options) {
  auto state = std::make_shared<ProgramState>();
  state->name = archive->name();
  state->exported =
      std::make_shared<ExportedProgram>(read_exported_program(*archive, AllowedOperators(options.allowed_operators)));
  state->weights = std::make_unique<Weights>(archive);
  for (const ProgramInput& input : state->exported->inputs) {
    const bool has_tensor = input.kind == ProgramInput::Kind::Parameter || input.kind == ProgramInput::Kind::Buffer ||
                            input.kind == ProgramInput::Kind::Constant;
    if (has_tensor && !state->weights->by_name().contains(input.name)) {
      throw ProgramError(concat(archive->name(), ": there is no tensor for '", input.name, "' in the archive."));
    }
  }
  tie_parameters_without_values(*state);
  refuse_mutated_aliases(*state);
  for (const Node& node : state->exported->graph.nodes) {
    const std::optional<bool> training = exported_mode(node);
    if (training && (!state->exported_in_training || *training)) state->exported_in_training = training;
  }
  state->mode->training = state->exported_in_training.value_or(true);
  state->whole = whole_of(*state, state->exported, state->mode,
                          [&](const ProgramInput& input) { return *state->find_tensor(input); });
  return state;
}

}  // namespace penstock::internal
