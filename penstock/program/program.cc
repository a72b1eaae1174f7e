#include "penstock/program/program.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <system_error>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/interpreter/initial_values.h"
#include "penstock/program/interpreter/input_check.h"
#include "penstock/program/interpreter/mode.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/interpreter/recomputed_modules.h"
#include "penstock/program/partition/colocation.h"
#include "penstock/tensor/random_scope.h"

namespace penstock {

using internal::concat;
using internal::InputCheck;
using internal::ModelTensor;
using internal::ProgramState;
using internal::TreeSpec;

namespace {

// Returns a line for each of the first nodes for which `belongs` is true, and the number of the others.
template <class Belongs>
std::string first_of(const Graph& graph, Belongs belongs) {
  constexpr int kNamed = 3;
  std::string lines;
  int count = 0;
  for (const Node& node : graph.nodes) {
    if (belongs(node) && ++count <= kNamed) lines += concat("\n  ", describe(graph, node));
  }
  if (count > kNamed) lines += concat("\n  and ", count - kNamed, " more");
  return lines;
}

bool is_in_dropout(const Graph& graph, const Node& node) {
  return node.call >= 0 &&
         graph.calls[static_cast<std::size_t>(node.call)].type.starts_with("torch.nn.modules.dropout.");
}

NamedTensors loaded(const ProgramState& state, NamedTensors tensors) {
  for (const auto& [name, tensor] : tensors) state.weights->load(tensor);
  return tensors;
}

}  // namespace

std::int64_t WeightInfo::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

internal::ProgramState& internal::state_of(const Program& program) {
  return *program.state_;
}

Program::Program(std::shared_ptr<ProgramState> state) : state_(std::move(state)) {}

Program::Program(const std::string& path, const ProgramOptions& options) {
  const auto archive = std::make_shared<const internal::Archive>(path);
  state_ = internal::read_program_state(archive, options);
  state_->source =
      internal::ProgramState::Source{.path = std::filesystem::absolute(path).string(), .checksum = archive->checksum()};
}

Program Program::from_bytes(std::string_view bytes, const std::string& name, const ProgramOptions& options) {
  return Program(internal::read_program_state(std::make_shared<const internal::Archive>(bytes, name), options));
}

std::vector<c10::IValue> Program::flatten_inputs(const Args& args, const Kwargs& kwargs) const {
  const TreeSpec& positional = state_->exported->in_spec.children()[0];
  const TreeSpec& named = state_->exported->in_spec.children()[1];
  if (args.size() != positional.children().size()) {
    throw ProgramError(concat("found ", args.size(), " arguments, expected ", positional.children().size(), "."));
  }
  std::vector<c10::IValue> leaves =
      positional.flatten(c10::ivalue::Tuple::create(std::vector<c10::IValue>(args.begin(), args.end())), "args");
  std::set<std::string> known;
  for (std::size_t i = 0; i < named.children().size(); ++i) {
    const std::string& name = named.keys()[i].toStringRef();
    known.insert(name);
    const auto found = kwargs.find(name);
    const TreeSpec& child = named.children()[i];
    if (found == kwargs.end() && child.kind() != TreeSpec::Kind::Leaf) {
      throw ProgramError("keyword argument '" + name + "' is missing.");
    }
    // A fixed input may be left out, which means None.
    const c10::IValue given = found == kwargs.end() ? c10::IValue() : found->second;
    for (c10::IValue& leaf : child.flatten(given, "kwargs." + name)) leaves.push_back(std::move(leaf));
  }
  for (const auto& [name, value] : kwargs) {
    if (!known.contains(name)) throw ProgramError("there is no keyword argument '" + name + "'.");
  }
  InputCheck check(*state_->exported);
  std::vector<c10::IValue> values;
  auto leaf = leaves.begin();
  for (const ProgramInput& input : inputs()) {
    if (input.kind != ProgramInput::Kind::User && input.kind != ProgramInput::Kind::Fixed) continue;
    if (input.kind == ProgramInput::Kind::User) *leaf = state_->scalar_argument(input, *leaf);
    check.check(input, *leaf);
    if (input.kind == ProgramInput::Kind::User) values.push_back(std::move(*leaf));
    ++leaf;
  }
  return values;
}

c10::IValue Program::run(const Args& args, const Kwargs& kwargs) const {
  state_->weights->load_all();
  return state_->exported->out_spec.unflatten(state_->whole->run(flatten_inputs(args, kwargs)));
}

void Program::train() {
  if (state_->exported_in_training == false) {
    throw ProgramError(name() + ": was exported in evaluation mode, and has lost what training needs:" +
                       first_of(graph(), [](const Node& node) { return internal::exported_mode(node) == false; }) +
                       "\n  Hint: call model.train() before torch.export.export.");
  }
  state_->mode->training = true;
}

void Program::eval() {
  const bool has_modes = state_->exported_in_training == true;
  const auto stays_on = [&](const Node& node) {
    return internal::drops_in_both_modes(node) && (has_modes || is_in_dropout(graph(), node));
  };
  if (state_->exported_in_training != false && std::ranges::any_of(graph().nodes, stays_on)) {
    throw ProgramError(name() +
                       ": was exported in training mode, and has no flag left for what evaluation leaves out:" +
                       first_of(graph(), stays_on) + "\n  Hint: export it again, without run_decompositions() or " +
                       "after model.eval().");
  }
  state_->mode->training = false;
}

bool Program::is_training() const {
  return state_->mode->training;
}

void Program::set_autocast(std::optional<at::ScalarType> dtype) {
  state_->mode->autocast = dtype;
}

void Program::recompute(const std::vector<std::string>& modules) {
  state_->mode->recomputed = modules.empty() ? nullptr
                                             : std::make_shared<const internal::RecomputedModules>(
                                                   internal::recomputed_modules(*state_->exported, modules));
}

bool Program::has_no_values() const {
  return state_->weights->lacks_values();
}

void Program::initialise(std::uint64_t seed, InitialValues values) {
  if (!values) values = initial_values_of_modules(*this);
  state_->weights->initialise([seed, values = std::move(values)](const std::string& name, at::Tensor& weight) {
    const at::NoGradGuard no_grad;
    const RandomScope scope(seed, internal::kInitialStep, /*microbatch=*/0, internal::place_of(name));
    values(name, weight);
  });
}

std::vector<std::string> Program::repeated_modules() const {
  return internal::repeated_modules(*state_->exported);
}

NamedTensors Program::parameters() const {
  return loaded(*state_, state_->tensors_of(ProgramInput::Kind::Parameter));
}

NamedTensors Program::buffers() const {
  return loaded(*state_, state_->tensors_of(ProgramInput::Kind::Buffer));
}

NamedTensors Program::state_dict() const {
  NamedTensors state = parameters();
  for (const ProgramInput& input : inputs()) {
    if (input.kind == ProgramInput::Kind::Buffer && input.persistent) state.emplace_back(input.name, tensor(input));
  }
  return state;
}

void Program::load_state_dict(const NamedTensors& state, const std::string& source, CopyWhen when) {
  std::vector<ModelTensor> tensors = state_->model_tensors();
  // Missing ones need initial values when they are used.
  for (ModelTensor& tensor : tensors) tensor.is_required = tensor.is_required && !has_no_values();
  const std::map<std::string, at::Tensor> given(state.begin(), state.end());
  const std::string differences = internal::state_differences(tensors, given);
  if (!differences.empty()) throw ProgramError(source + ": does not fit " + name() + ":\n" + differences);
  for (const ModelTensor& tensor : tensors) {
    for (const std::string& name : tensor.names) {
      const auto found = given.find(name);
      if (found == given.end()) continue;
      state_->weights->replace(tensor.tensor, found->second);
      break;
    }
  }
  if (when == CopyWhen::Now) state_->weights->load_all();
}

NamedTensors Program::mutated_tensors() const {
  const std::set<int> mutated = internal::mutated_values(*state_->exported);
  NamedTensors tensors;
  for (const ProgramInput& input : inputs()) {
    if (mutated.contains(input.value)) tensors.emplace_back(input.name, tensor(input));
  }
  return tensors;
}

void Program::save(const std::string& path) const {
  if (has_no_values()) {
    throw ProgramError(name() +
                       ": was exported on the meta device, and its file has no room for weights.\n"
                       "  Hint: write them to a safetensors file.");
  }
  if (!state_->source) {
    throw ProgramError(name() + ": was read from memory, so there is no file to copy.\n  Hint: read it from a file.");
  }
  const internal::Archive archive(state_->source->path);
  if (archive.checksum() != state_->source->checksum) {
    throw ProgramError(name() + ": has changed since the program was read.\n  Hint: read it again.");
  }
  archive.write_copy(path, state_->weights->records());
  // A copy that has replaced the file is the source of the next one.
  std::error_code ignored;
  if (std::filesystem::equivalent(path, state_->source->path, ignored)) {
    state_->source->checksum = internal::Archive(path).checksum();
  }
}

std::vector<WeightInfo> Program::weights() const {
  std::vector<WeightInfo> weights;
  for (const ModelTensor& tensor : state_->model_tensors()) {
    weights.push_back({.names = tensor.names,
                       .is_parameter = false,
                       .sizes = tensor.tensor.sizes().vec(),
                       .dtype = tensor.tensor.scalar_type(),
                       .persistent = tensor.is_required});
  }
  std::map<std::string, WeightInfo*> by_name;
  for (WeightInfo& weight : weights) {
    for (const std::string& name : weight.names) by_name[name] = &weight;
  }
  for (const ProgramInput& input : inputs()) {
    if (input.kind == ProgramInput::Kind::Parameter) by_name.at(input.name)->is_parameter = true;
  }
  return weights;
}

const Graph& Program::graph() const {
  return state_->exported->graph;
}

const std::vector<ProgramInput>& Program::inputs() const {
  return state_->exported->inputs;
}

const std::vector<ProgramOutput>& Program::outputs() const {
  return state_->exported->outputs;
}

const std::map<std::string, SymbolRange>& Program::ranges() const {
  return state_->exported->ranges;
}

const at::Tensor& Program::tensor(const ProgramInput& input) const {
  const at::Tensor& tensor = *state_->find_tensor(input);
  state_->weights->load(tensor);
  return tensor;
}

const std::string& Program::name() const {
  return state_->name;
}

}  // namespace penstock
