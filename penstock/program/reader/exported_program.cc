#include "penstock/program/reader/exported_program.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "penstock/base/index.h"
#include "penstock/base/text.h"
#include "penstock/program/error.h"
#include "penstock/program/reader/graph_reader.h"
#include "penstock/program/reader/json.h"
#include "penstock/program/reader/operands.h"
#include "penstock/program/reader/schema.h"
#include "penstock/tensor/nested.h"

namespace penstock::internal {
namespace {

using nlohmann::json;

constexpr int kSchemaMajor = 8;

class Reader {
 public:
  Reader(std::string where, ExportedProgram& exported, const AllowedOperators& allowed)
      : nodes_(std::move(where), exported.graph, allowed), exported_(&exported) {}

  void read(const json& module) {
    read_interface(module.at("module_call_graph"));
    const json& graph = module.at("graph");
    Scope scope;
    nodes_.declare(graph);
    const auto signature = module.at("signature").get<schema::GraphSignature>();
    read_inputs(graph.at("inputs"), signature, scope);
    nodes_.read_nodes(graph, scope, /*region=*/0);
    read_outputs(signature, scope);
  }

 private:
  void read_interface(const json& calls) {
    for (const json& entry : calls) {
      if (!entry.at("fqn").get<std::string>().empty()) continue;
      if (entry.at("signature").is_null()) break;
      const auto signature = entry.at("signature").get<schema::ModuleCallSignature>();
      exported_->in_spec = TreeSpec::parse(signature.get_in_spec(), nodes_.where() + ", the input structure");
      exported_->out_spec = TreeSpec::parse(signature.get_out_spec(), nodes_.where() + ", the output structure");
      const TreeSpec& in = exported_->in_spec;
      const bool right = in.kind() == TreeSpec::Kind::Tuple && in.children().size() == 2 &&
                         in.children()[0].kind() == TreeSpec::Kind::Tuple &&
                         in.children()[1].kind() == TreeSpec::Kind::Dict &&
                         std::ranges::all_of(in.children()[1].keys(), &c10::IValue::isString);
      if (!right) nodes_.fail("the inputs should be a tuple of positional arguments and a dict of keyword arguments.");
      return;
    }
    nodes_.fail("the model itself has no signature.");
  }

  void read_inputs(const json& inputs, const schema::GraphSignature& signature, Scope& scope) {
    const std::vector<std::string> args = exported_->in_spec.children()[0].paths("args");
    const std::vector<std::string> kwargs = exported_->in_spec.children()[1].paths("kwargs");
    std::vector<std::string> paths = args;
    paths.insert(paths.end(), kwargs.begin(), kwargs.end());
    std::size_t next_path = 0;
    const auto next_user_path = [&] {
      if (next_path == paths.size()) throw ProgramError("there are more inputs than the input structure has.");
      return paths[next_path++];
    };
    std::size_t index = 0;
    for (const schema::InputSpec& spec : signature.get_input_specs()) {
      nodes_.at(concat("input ", index), [&] {
        if (index >= inputs.size()) throw ProgramError("is in the signature, but not in the graph.");
        read_input(inputs[index].get<schema::Argument>(), spec, next_user_path, scope);
      });
      ++index;
    }
    if (index != inputs.size()) nodes_.fail("the graph has inputs that are not in the signature.");
    if (next_path != paths.size()) nodes_.fail("there are fewer inputs than the input structure has.");
  }

  template <class NextUserPath>
  void read_input(const schema::Argument& argument, const schema::InputSpec& spec, NextUserPath next_user_path,
                  Scope& scope) {
    ProgramInput input;
    const auto tensor = [&](const schema::TensorArgument& tensor_argument) {
      return nodes_.define(tensor_argument.get_name(), ValueKind::Tensor, /*producer=*/-1, scope);
    };
    switch (spec.tag()) {
      case schema::InputSpec::Tag::PARAMETER:
        input.kind = ProgramInput::Kind::Parameter;
        input.name = spec.get_parameter().get_parameter_name();
        input.value = tensor(spec.get_parameter().get_arg());
        break;
      case schema::InputSpec::Tag::BUFFER:
        input.kind = ProgramInput::Kind::Buffer;
        input.name = spec.get_buffer().get_buffer_name();
        input.persistent = spec.get_buffer().get_persistent();
        input.value = tensor(spec.get_buffer().get_arg());
        break;
      case schema::InputSpec::Tag::TENSOR_CONSTANT:
        input.kind = ProgramInput::Kind::Constant;
        input.name = spec.get_tensor_constant().get_tensor_constant_name();
        input.value = tensor(spec.get_tensor_constant().get_arg());
        break;
      case schema::InputSpec::Tag::USER_INPUT:
        require_kind([&] { spec.get_user_input(); }, "has an unknown kind.");
        input.name = next_user_path();
        input.value = read_user_input(argument, input, scope);
        break;
      case schema::InputSpec::Tag::CONSTANT_INPUT:
        input.kind = ProgramInput::Kind::Fixed;
        input.name = next_user_path();
        input.fixed = fixed_value(spec.get_constant_input().get_value());
        introduce(spec.get_constant_input().get_name(), constant(input.fixed), scope);
        break;
      case schema::InputSpec::Tag::CUSTOM_OBJ:
        throw ProgramError(concat("is the custom object '", spec.get_custom_obj().get_custom_obj_name(),
                                  "', and custom objects are not supported."));
      case schema::InputSpec::Tag::TOKEN:
        throw ProgramError("is a token of an operator with side effects, which is not supported.");
    }
    for (const ProgramInput& other : exported_->inputs) {
      if (other.name == input.name) throw ProgramError(concat("has the name '", input.name, "' of another input."));
    }
    exported_->inputs.push_back(std::move(input));
  }

  int read_user_input(const schema::Argument& argument, ProgramInput& input, Scope& scope) {
    using Tag = schema::Argument::Tag;
    const auto fix = [&](c10::IValue value) {
      input.kind = ProgramInput::Kind::Fixed;
      input.fixed = std::move(value);
      return -1;
    };
    switch (argument.tag()) {
      case Tag::AS_TENSOR: return nodes_.define(argument.get_as_tensor().get_name(), ValueKind::Tensor, -1, scope);
      case Tag::AS_SYM_INT:
        if (argument.get_as_sym_int().tag() == schema::SymIntArgument::Tag::AS_NAME) {
          return nodes_.define(argument.get_as_sym_int().get_as_name(), ValueKind::Int, -1, scope);
        }
        return fix(argument.get_as_sym_int().get_as_int());
      case Tag::AS_SYM_FLOAT:
        if (argument.get_as_sym_float().tag() == schema::SymFloatArgument::Tag::AS_NAME) {
          return nodes_.define(argument.get_as_sym_float().get_as_name(), ValueKind::Float, -1, scope);
        }
        return fix(argument.get_as_sym_float().get_as_float().get());
      case Tag::AS_SYM_BOOL:
        if (argument.get_as_sym_bool().tag() == schema::SymBoolArgument::Tag::AS_NAME) {
          return nodes_.define(argument.get_as_sym_bool().get_as_name(), ValueKind::Bool, -1, scope);
        }
        return fix(argument.get_as_sym_bool().get_as_bool());
      default: {
        const Operand operand = operand_of(argument, scope);
        if (!operand.is_constant()) throw ProgramError("has a kind that cannot be an input.");
        return fix(operand.constant);
      }
    }
  }

  static c10::IValue fixed_value(const schema::ConstantValue& value) {
    switch (value.tag()) {
      case schema::ConstantValue::Tag::AS_NONE: return {};
      case schema::ConstantValue::Tag::AS_INT: return value.get_as_int();
      case schema::ConstantValue::Tag::AS_FLOAT: return value.get_as_float().get();
      case schema::ConstantValue::Tag::AS_STRING: return value.get_as_string();
      case schema::ConstantValue::Tag::AS_BOOL: return value.get_as_bool();
    }
    return {};
  }

  void read_outputs(const schema::GraphSignature& signature, const Scope& scope) {
    std::size_t users = 0;
    std::size_t index = 0;
    std::set<std::pair<ProgramOutput::Kind, std::string>> targets;
    for (const schema::OutputSpec& spec : signature.get_output_specs()) {
      nodes_.at(concat("output ", index++), [&] {
        ProgramOutput output = output_of(spec, scope);
        if (output.kind == ProgramOutput::Kind::User) {
          ++users;
        } else if (!targets.emplace(output.kind, output.target).second) {
          throw ProgramError(concat("is written to '", output.target, "', like another output."));
        }
        exported_->outputs.push_back(std::move(output));
      });
    }
    if (users != exported_->out_spec.leaves()) {
      nodes_.fail(concat("found ", users, " outputs, expected the ", exported_->out_spec.leaves(),
                         " of the output structure."));
    }
  }

  ProgramOutput output_of(const schema::OutputSpec& spec, const Scope& scope) {
    using Tag = schema::OutputSpec::Tag;
    switch (spec.tag()) {
      case Tag::USER_OUTPUT: {
        require_kind([&] { spec.get_user_output(); }, "has an unknown kind.");
        Operand operand = operand_of(spec.get_user_output().get_arg(), scope);
        if (operand.list != Operand::ListKind::None) throw ProgramError("is a list, expected one value.");
        return {.kind = ProgramOutput::Kind::User, .operand = std::move(operand), .target = ""};
      }
      case Tag::LOSS_OUTPUT:
        return {.kind = ProgramOutput::Kind::User,
                .operand = operand_of(spec.get_loss_output().get_arg(), scope),
                .target = ""};
      case Tag::BUFFER_MUTATION:
        return {.kind = ProgramOutput::Kind::Buffer,
                .operand = operand_of(spec.get_buffer_mutation().get_arg(), scope),
                .target = written(ProgramInput::Kind::Buffer, spec.get_buffer_mutation().get_buffer_name())};
      case Tag::PARAMETER_MUTATION:
        return {.kind = ProgramOutput::Kind::Parameter,
                .operand = operand_of(spec.get_parameter_mutation().get_arg(), scope),
                .target = written(ProgramInput::Kind::Parameter, spec.get_parameter_mutation().get_parameter_name())};
      case Tag::USER_INPUT_MUTATION:
        return {.kind = ProgramOutput::Kind::Input,
                .operand = operand_of(spec.get_user_input_mutation().get_arg(), scope),
                .target = user_input(spec.get_user_input_mutation().get_user_input_name(), scope)};
      case Tag::GRADIENT_TO_PARAMETER:
      case Tag::GRADIENT_TO_USER_INPUT:
        throw ProgramError(
            "is a gradient: the program contains its backward.\n  Hint: export the forward alone; autograd computes "
            "the backward.");
      case Tag::TOKEN: throw ProgramError("is a token of an operator with side effects, which is not supported.");
    }
    throw ProgramError("has an unknown kind.");
  }

  std::string written(ProgramInput::Kind kind, const std::string& name) const {
    const bool exists = std::any_of(exported_->inputs.begin(), exported_->inputs.end(), [&](const ProgramInput& input) {
      return input.kind == kind && input.name == name;
    });
    if (!exists) throw ProgramError(concat("is written to '", name, "', which does not exist."));
    return name;
  }

  std::string user_input(const std::string& name, const Scope& scope) const {
    const Operand& operand = look_up(name, scope);
    for (const ProgramInput& input : exported_->inputs) {
      if (input.kind != ProgramInput::Kind::User || !operand.is_value() || input.value != operand.value) continue;
      if (exported_->graph.values[static_cast<std::size_t>(input.value)].kind == ValueKind::Tensor) return input.name;
      throw ProgramError(concat("is written to '", name, "', which is not a tensor."));
    }
    throw ProgramError(concat("is written to '", name, "', which is not an input."));
  }

  GraphReader nodes_;
  ExportedProgram* exported_;
};

// Returns the buffer to which the last node copies a new value, provided that nothing else writes to it or reads the
// copy; null if there is none.
const ProgramInput* assigned_last(const ExportedProgram& exported) {
  const Effects& effects = exported.effects;
  if (exported.graph.nodes.empty()) return nullptr;
  const Node& last = exported.graph.nodes.back();
  if (last.operator_name() != "aten::copy_" || !last.operands[0].is_value() || !last.operands[1].is_value())
    return nullptr;
  const int to = last.operands[0].value;
  const int from = effects.root_of(last.operands[1].value);
  if (effects.writers[index(to)].size() != 1 || !effects.writers[index(from)].empty()) return nullptr;
  for (const ProgramOutput& output : exported.outputs) {
    if (output.operand.is_value() && effects.root_of(output.operand.value) == to) return nullptr;
  }
  const ProgramInput* buffer = nullptr;
  for (const ProgramInput& input : exported.inputs) {
    if (input.value == from && input.kind != ProgramInput::Kind::User) return nullptr;
    if (input.value == to && input.kind == ProgramInput::Kind::Buffer) buffer = &input;
  }
  return buffer;
}

// Turns assignments into outputs. `self.buffer = value` is exported as a copy after all other nodes, wherever it is in
// the model; as an output that is written at the end, it can be in the stage that produces the value.
void extract_assignments(ExportedProgram& exported) {
  Graph& graph = exported.graph;
  const std::size_t before = graph.nodes.size();
  while (const ProgramInput* const buffer = assigned_last(exported)) {
    exported.outputs.push_back({.kind = ProgramOutput::Kind::Buffer,
                                .operand = std::move(graph.nodes.back().operands[1]),
                                .target = buffer->name});
    graph.nodes.pop_back();
  }
  if (graph.nodes.size() == before) return;
  for (int& mark : graph.marks) mark = std::min(mark, static_cast<int>(graph.nodes.size()));
  exported.effects = effects_of(graph);
}

void check_version(const json& program, const std::string& where) {
  const json version = program.value("schema_version", json::object());
  const json major = version.is_object() ? version.value("major", json()) : json();
  if (!major.is_number_integer()) throw ProgramError(where + ": has no schema_version.");
  if (major != kSchemaMajor) {
    throw ProgramError(concat(where, ": found schema version ", major.dump(), ", expected ", kSchemaMajor,
                              ".\n  Hint: export the model with PyTorch 2.13."));
  }
}

}  // namespace

ExportedProgram read_exported_program(const Archive& archive, const AllowedOperators& allowed) {
  if (archive.contains("byteorder") && archive.text("byteorder") != "little") {
    throw ProgramError(archive.name() + ": was written on a machine with another byte order.");
  }
  const std::string record = "models/" + model_name(archive) + ".json";
  const std::string where = archive.name() + ": " + record;
  const json program = parse_exported_json(archive.text(record), where);
  ExportedProgram exported;
  try {
    if (!program.is_object()) throw ProgramError(where + ": should be an object.");
    check_version(program, where);
    for (const auto& [symbol, range] : program.at("range_constraints").items()) {
      const auto constraint = range.get<schema::RangeConstraint>();
      SymbolRange& known = exported.ranges[symbol];
      known.least = constraint.get_min_val().value_or(known.least);
      known.most = constraint.get_max_val().value_or(known.most);
    }
    Reader(where, exported, allowed).read(program.at("graph_module"));
    exported.effects = effects_of(exported.graph);
    extract_assignments(exported);
  } catch (const ProgramError&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw ProgramError(concat(where, ": does not match the schema: ", error.what()));
  }
  return exported;
}

}  // namespace penstock::internal
