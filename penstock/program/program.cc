#include "penstock/program/program.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "penstock/program/interpreter/mode.h"
#include "penstock/program/interpreter/program_state.h"
#include "penstock/program/interpreter/subgraph.h"
#include "penstock/program/partition/colocation.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

std::string shape_text(c10::IntArrayRef shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text.append(i == 0 ? "" : ", ").append(std::to_string(shape[i]));
  return text + "]";
}

// What an input is, against what it was when the program was exported.
class InputCheck {
 public:
  explicit InputCheck(const Exported& exported) : exported_(&exported) {}

  void check(const ProgramInput& input, const c10::IValue& given) {
    if (input.kind == ProgramInput::Kind::Fixed) {
      check_fixed(input, given);
      return;
    }
    const Value& value = exported_->graph.values[static_cast<std::size_t>(input.value)];
    const auto expect = [&](bool right, const std::string& what) {
      if (!right) throw ProgramError(input.name + ": found " + describe(given) + ", expected " + what + ".");
    };
    switch (value.kind) {
      case ValueKind::Int: expect(given.isInt(), "an int"); return;
      case ValueKind::Float: expect(given.isDouble() || given.isInt(), "a float"); return;
      case ValueKind::Bool: expect(given.isBool(), "a bool"); return;
      case ValueKind::Object: return;
      case ValueKind::Tensor: break;
    }
    expect(given.isTensor() && given.toTensor().defined(), value.type ? to_string(*value.type) : "a tensor");
    if (value.type) check_tensor(input.name, *value.type, given.toTensor());
  }

 private:
  static void check_fixed(const ProgramInput& input, const c10::IValue& given) {
    // None stands for what was left out.
    const c10::IValue& fixed = input.fixed;
    const bool same =
        fixed.isNone() ? given.isNone() : given.isNone() || (fixed.tagKind() == given.tagKind() && fixed == given);
    if (!same) {
      throw ProgramError(input.name + ": found " + describe(given) + ", and the program was exported for " +
                         describe(fixed) + " alone.");
    }
  }

  void check_tensor(const std::string& name, const TensorType& type, const at::Tensor& tensor) {
    if (tensor.scalar_type() != type.dtype) {
      throw ProgramError(name + ": found dtype " + dtype_name(tensor.scalar_type()) + ", expected " +
                         dtype_name(type.dtype) + ".");
    }
    if (static_cast<std::size_t>(tensor.dim()) != type.sizes.size()) {
      throw ProgramError(name + ": found shape " + shape_text(tensor.sizes()) + ", expected " + to_string(type) + ".");
    }
    for (std::size_t i = 0; i < type.sizes.size(); ++i) {
      check_size(name + ", dimension " + std::to_string(i), type.sizes[i], tensor.size(static_cast<std::int64_t>(i)));
    }
  }

  void check_size(const std::string& place, const Dimension& dimension, std::int64_t size) {
    const auto refuse = [&](const std::string& expected) {
      throw ProgramError(place + ": found " + std::to_string(size) + ", expected " + expected);
    };
    if (dimension.is_fixed()) {
      if (size == dimension.example) return;
      refuse(std::to_string(dimension.example) +
             ", which is fixed.\n  Hint: torch.export.export(…, dynamic_shapes=…) leaves it open.");
    }
    const std::string& text = dimension.expression.text;
    // What is of another form is a symbol by itself.
    const auto linear = dimension.expression.linear.value_or(SizeExpression::Linear{.symbol = text, .factor = 1});
    const bool is_symbol = linear.symbol == text;
    if (const auto known = seen_.find(linear.symbol); known != seen_.end()) {
      const auto& [number, where] = known->second;
      std::int64_t expected = 0;
      const bool is_too_large = __builtin_mul_overflow(linear.factor, number, &expected) ||
                                __builtin_add_overflow(expected, linear.offset, &expected);
      if (!is_too_large && size == expected) return;
      refuse((is_too_large ? "more than there are" : std::to_string(expected)) +
             (is_symbol ? ", as in " + where + " (both are " + text + ")."
                        : ": it is " + text + ", and " + linear.symbol + " is " + std::to_string(number) + " by " +
                              where + "."));
    }
    std::int64_t multiple = 0;
    const bool is_of_form =
        !__builtin_sub_overflow(size, linear.offset, &multiple) && linear.factor > 0 && multiple % linear.factor == 0;
    if (!is_of_form) refuse("one that is " + text + ".");
    const std::int64_t number = multiple / linear.factor;
    const auto range = exported_->ranges.find(linear.symbol);
    if (range != exported_->ranges.end() && (number < range->second.least || number > range->second.most)) {
      const std::string limits = std::to_string(range->second.least) + " to " + std::to_string(range->second.most);
      refuse(is_symbol ? limits + " (" + text + ")." : text + " with " + linear.symbol + " from " + limits + ".");
    }
    seen_.emplace(linear.symbol, std::pair(number, place));
  }

  const Exported* exported_;
  // The size that a symbol stands for, and where it was first met.
  std::map<std::string, std::pair<std::int64_t, std::string>> seen_;
};

// All of the program as one part, on the weights that `tensor_of` gives.
template <class TensorOf>
std::shared_ptr<const Part> whole_of(const Program::State& state, std::shared_ptr<const Code::Mode> mode,
                                     TensorOf tensor_of) {
  Part::Contents contents;
  contents.inputs_are_given = true;
  contents.nodes.resize(state.exported->graph.nodes.size());
  std::iota(contents.nodes.begin(), contents.nodes.end(), 0);
  for (const ProgramInput& input : state.exported->inputs) {
    if (input.kind == ProgramInput::Kind::User) contents.inputs.push_back(input.value);
    if (state.find_tensor(input) != nullptr) contents.held.emplace_back(input.value, tensor_of(input));
  }
  for (const ProgramOutput& output : state.exported->outputs) {
    if (output.kind == ProgramOutput::Kind::User) {
      contents.outputs.push_back(output.operand);
    } else {
      contents.writes.push_back(state.write_of(output));
    }
  }
  return std::make_shared<Part>(state.exported, std::move(contents), std::move(mode));
}

// A view would have to follow what is written to what it is a view of, in every stage.
void refuse_written_views(const Program::State& state) {
  const std::set<int> written = written_values(*state.exported);
  for (const ProgramInput& one : state.exported->inputs) {
    if (!written.contains(one.value)) continue;
    const at::Tensor& tensor = *state.find_tensor(one);
    for (const ProgramInput& other : state.exported->inputs) {
      const at::Tensor* const view = state.find_tensor(other);
      if (view == nullptr || view->is_same(tensor) || !view->is_alias_of(tensor)) continue;
      throw ProgramError(state.name + ": '" + one.name + "' is written to, and '" + other.name +
                         "' lies in the same memory; what is written has memory of its own.");
    }
  }
}

std::shared_ptr<Program::State> read_state(const Archive& archive, const ProgramOptions& options) {
  auto state = std::make_shared<Program::State>();
  state->name = archive.name();
  state->exported = std::make_shared<Exported>(read_exported(archive, AllowedOperators(options.allowed_operators)));
  state->weights = read_weights(archive, &state->weight_records);
  for (const ProgramInput& input : state->exported->inputs) {
    const bool has_tensor = input.kind == ProgramInput::Kind::Parameter || input.kind == ProgramInput::Kind::Buffer ||
                            input.kind == ProgramInput::Kind::Constant;
    if (has_tensor && !state->weights.contains(input.name)) {
      throw ProgramError(archive.name() + ": there is no tensor for '" + input.name + "' in the archive.");
    }
  }
  refuse_written_views(*state);
  for (const Node& node : state->exported->graph.nodes) {
    const std::optional<bool> training = exported_mode(node);
    if (training && (!state->exported_in_training || *training)) state->exported_in_training = training;
  }
  state->mode->training = state->exported_in_training.value_or(true);
  state->whole = whole_of(*state, state->mode, [&](const ProgramInput& input) { return *state->find_tensor(input); });
  return state;
}

// A line for each of the first nodes for which `belongs` is true, and how many more there are.
template <class Belongs>
std::string first_of(const Graph& graph, Belongs belongs) {
  constexpr int kNamed = 3;
  std::string lines;
  int count = 0;
  for (const Node& node : graph.nodes) {
    if (belongs(node) && ++count <= kNamed) lines += "\n  " + describe(graph, node);
  }
  if (count > kNamed) lines += "\n  and " + std::to_string(count - kNamed) + " more";
  return lines;
}

bool is_of_dropout(const Graph& graph, const Node& node) {
  return node.call >= 0 &&
         graph.calls[static_cast<std::size_t>(node.call)].type.starts_with("torch.nn.modules.dropout.");
}

}  // namespace

const at::Tensor* Program::State::find_tensor(const ProgramInput& input) const {
  switch (input.kind) {
    case ProgramInput::Kind::Parameter:
    case ProgramInput::Kind::Buffer:
    case ProgramInput::Kind::Constant: return &weights.at(input.name);
    default: return nullptr;
  }
}

std::shared_ptr<const Part> Program::State::part_on_copies(std::shared_ptr<const Code::Mode> own_mode) const {
  return whole_of(*this, std::move(own_mode), [&](const ProgramInput& input) {
    const at::Tensor& tensor = *find_tensor(input);
    return input.kind == ProgramInput::Kind::Buffer ? tensor.clone() : tensor;
  });
}

Part::Write Program::State::write_of(const ProgramOutput& output) const {
  Part::Write write{.operand = output.operand};
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

Program::Program(const std::string& path, const ProgramOptions& options) : Program(Archive(path), options) {}

Program::Program(const Archive& archive, const ProgramOptions& options) : state_(read_state(archive, options)) {}

// A microbatch of a batch of numbers is a tensor of one element, where the program takes a number.
c10::IValue Program::State::number_for(const ProgramInput& input, const c10::IValue& given) const {
  const Value& value = exported->graph.values[static_cast<std::size_t>(input.value)];
  const bool takes_number = value.kind == ValueKind::Tensor && value.type && value.type->sizes.empty();
  const bool is_row = given.isTensor() && given.toTensor().defined() && given.toTensor().dim() == 1;
  return takes_number && is_row && given.toTensor().numel() == 1 ? c10::IValue(given.toTensor()[0]) : given;
}

std::vector<c10::IValue> Program::flatten_inputs(const Args& args, const Kwargs& kwargs) const {
  const TreeSpec& positional = in_spec().children()[0];
  const TreeSpec& named = in_spec().children()[1];
  if (args.size() != positional.children().size()) {
    throw ProgramError("found " + std::to_string(args.size()) + " arguments, expected " +
                       std::to_string(positional.children().size()) + ".");
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
    // Who leaves out a number that is fixed need not give None for it.
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
    if (input.kind == ProgramInput::Kind::User) *leaf = state_->number_for(input, *leaf);
    check.check(input, *leaf);
    if (input.kind == ProgramInput::Kind::User) values.push_back(std::move(*leaf));
    ++leaf;
  }
  return values;
}

c10::IValue Program::run(const Args& args, const Kwargs& kwargs) const {
  return out_spec().unflatten(state_->whole->run(flatten_inputs(args, kwargs)));
}

void Program::train() {
  if (state_->exported_in_training == false) {
    throw ProgramError(name() + ": was exported in evaluation mode, and has lost what training needs:" +
                       first_of(graph(), [](const Node& node) { return exported_mode(node) == false; }) +
                       "\n  Hint: call model.train() before torch.export.export.");
  }
  state_->mode->training = true;
}

void Program::eval() {
  const bool has_modes = state_->exported_in_training == true;
  const auto stays_on = [&](const Node& node) {
    return drops_in_both_modes(node) && (has_modes || is_of_dropout(graph(), node));
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
  state_->mode->autocast = dtype ? std::optional(Region::Autocast{.dtype = *dtype}) : std::nullopt;
}

NamedTensors Program::parameters() const {
  return state_->tensors_of(ProgramInput::Kind::Parameter);
}

NamedTensors Program::buffers() const {
  return state_->tensors_of(ProgramInput::Kind::Buffer);
}

NamedTensors Program::State::tensors_of(ProgramInput::Kind kind) const {
  NamedTensors tensors;
  for (const ProgramInput& input : exported->inputs) {
    if (input.kind == kind) tensors.emplace_back(input.name, *find_tensor(input));
  }
  return tensors;
}

NamedTensors Program::state_dict() const {
  NamedTensors state = parameters();
  for (const ProgramInput& input : inputs()) {
    if (input.kind == ProgramInput::Kind::Buffer && input.persistent) state.emplace_back(input.name, tensor(input));
  }
  return state;
}

std::vector<ModelTensor> Program::State::model_tensors() const {
  std::vector<ModelTensor> tensors;
  std::map<const void*, std::size_t> places;
  for (const ProgramInput& input : exported->inputs) {
    if (input.kind != ProgramInput::Kind::Parameter && input.kind != ProgramInput::Kind::Buffer) continue;
    const at::Tensor& tensor = *find_tensor(input);
    const auto [place, is_new] = places.emplace(tensor.unsafeGetTensorImpl(), tensors.size());
    if (is_new) tensors.push_back({.names = {}, .tensor = tensor, .is_required = false});
    ModelTensor& one = tensors[place->second];
    one.names.push_back(input.name);
    one.is_required = one.is_required || input.persistent;
  }
  return tensors;
}

void Program::load_state_dict(const NamedTensors& state, const std::string& source) {
  const std::vector<ModelTensor> own = state_->model_tensors();
  const std::map<std::string, at::Tensor> given(state.begin(), state.end());
  const std::string differences = state_differences(own, given);
  if (!differences.empty()) throw ProgramError(source + ": does not fit " + name() + ":\n" + differences);
  load_state(own, given);
}

void Program::write_archive(const Archive& archive, const std::string& path) const {
  archive.write_copy(path, state_->weight_records);
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

const TreeSpec& Program::in_spec() const {
  return state_->exported->in_spec;
}

const TreeSpec& Program::out_spec() const {
  return state_->exported->out_spec;
}

const std::map<std::string, SymbolRange>& Program::ranges() const {
  return state_->exported->ranges;
}

const at::Tensor& Program::tensor(const ProgramInput& input) const {
  return *state_->find_tensor(input);
}

const std::string& Program::name() const {
  return state_->name;
}

}  // namespace penstock
