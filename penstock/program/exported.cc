#include "penstock/program/exported.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "penstock/program/error.h"
#include "penstock/program/json.h"
#include "penstock/program/operands.h"
#include "penstock/program/operators.h"
#include "penstock/program/schema.h"
#include "penstock/tensor/nested.h"

namespace penstock {
namespace {

using nlohmann::json;

constexpr int kSchemaMajor = 8;

class Reader {
 public:
  Reader(std::string where, Exported& exported) : where_(std::move(where)), exported_(&exported) {}

  void read(const json& module) {
    read_interface(module.at("module_call_graph"));
    const json& graph = module.at("graph");
    Scope scope;
    declare(graph, scope);
    const auto signature = module.at("signature").get<schema::GraphSignature>();
    read_inputs(graph.at("inputs"), signature, scope);
    read_nodes(graph, scope, /*region=*/0);
    read_outputs(signature, scope);
  }

 private:
  // What the graph says of the values in it, until they come.
  struct Declared {
    std::unordered_map<std::string, TensorType> tensors;
  };

  Graph& graph() { return exported_->graph; }

  [[noreturn]] void fail(const std::string& what) const { throw ProgramError(where_ + ": " + what); }

  // As errors of a node, whatever they are.
  template <class Act>
  void at(const std::string& place, Act act) {
    try {
      act();
    } catch (const ProgramError& error) {
      fail(place + ": " + error.what());
    } catch (const json::exception& error) {
      fail(place + ": is not as the schema has it: " + error.what());
    }
  }

  void read_interface(const json& calls) {
    for (const json& entry : calls) {
      if (entry.at("fqn") != "") continue;
      if (entry.at("signature").is_null()) break;
      const auto signature = entry.at("signature").get<schema::ModuleCallSignature>();
      exported_->in_spec = TreeSpec::parse(signature.get_in_spec(), where_ + ", the structure of the inputs");
      exported_->out_spec = TreeSpec::parse(signature.get_out_spec(), where_ + ", the structure of the outputs");
      const TreeSpec& in = exported_->in_spec;
      const bool right = in.kind() == TreeSpec::Kind::Tuple && in.children().size() == 2 &&
                         in.children()[0].kind() == TreeSpec::Kind::Tuple &&
                         in.children()[1].kind() == TreeSpec::Kind::Dict;
      if (!right) fail("the inputs should be a tuple of arguments and a dict of keyword arguments.");
      return;
    }
    fail("the model itself has no signature.");
  }

  // Types of tensors, by their names in this graph.
  void declare(const json& graph, Scope& /*scope*/) {
    declared_.emplace_back();
    for (const auto& [name, meta] : graph.at("tensor_values").items()) {
      at("value '" + name + "'",
         [&] { declared_.back().tensors.emplace(name, type_of(meta.get<schema::TensorMeta>())); });
    }
  }

  int add_value(const std::string& name, ValueKind kind, int producer) {
    Value value{.name = name, .kind = kind, .producer = producer};
    const auto& tensors = declared_.back().tensors;
    if (const auto found = tensors.find(name); found != tensors.end()) value.type = found->second;
    graph().values.push_back(std::move(value));
    return static_cast<int>(graph().values.size()) - 1;
  }

  int define(const std::string& name, ValueKind kind, int producer, Scope& scope) {
    const int value = add_value(name, kind, producer);
    if (!scope.emplace(name, Operand{.value = value}).second)
      throw ProgramError("there are two values '" + name + "'.");
    return value;
  }

  void read_inputs(const json& inputs, const schema::GraphSignature& signature, Scope& scope) {
    const std::vector<std::string> args = exported_->in_spec.children()[0].paths("args");
    const std::vector<std::string> kwargs = exported_->in_spec.children()[1].paths("kwargs");
    std::vector<std::string> paths = args;
    paths.insert(paths.end(), kwargs.begin(), kwargs.end());
    std::size_t next_path = 0;
    const auto next_user_path = [&] {
      if (next_path == paths.size()) throw ProgramError("there are more inputs than the structure of the inputs has.");
      return paths[next_path++];
    };
    std::size_t index = 0;
    for (const schema::InputSpec& spec : signature.get_input_specs()) {
      at("input " + std::to_string(index), [&] {
        if (index >= inputs.size()) throw ProgramError("is in the signature, and not in the graph.");
        read_input(inputs[index].get<schema::Argument>(), spec, next_user_path, scope);
      });
      ++index;
    }
    if (index != inputs.size()) fail("the graph has inputs that are not in the signature.");
    if (next_path != paths.size()) fail("there are fewer inputs than the structure of the inputs has.");
  }

  template <class NextUserPath>
  void read_input(const schema::Argument& argument, const schema::InputSpec& spec, NextUserPath next_user_path,
                  Scope& scope) {
    ProgramInput input;
    const auto tensor = [&](const schema::TensorArgument& of) {
      return define(of.get_name(), ValueKind::Tensor, /*producer=*/-1, scope);
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
        input.name = next_user_path();
        input.value = read_user_input(argument, input, scope);
        break;
      case schema::InputSpec::Tag::CONSTANT_INPUT:
        input.kind = ProgramInput::Kind::Fixed;
        input.name = next_user_path();
        input.fixed = fixed_value(spec.get_constant_input().get_value());
        scope.emplace(spec.get_constant_input().get_name(), constant(input.fixed));
        break;
      case schema::InputSpec::Tag::CUSTOM_OBJ:
        throw ProgramError("is the object '" + spec.get_custom_obj().get_custom_obj_name() +
                           "' of a class of Python's or TorchScript's, which cannot be read.");
      case schema::InputSpec::Tag::TOKEN:
        throw ProgramError("is a token of an operator with side effects, which cannot be run.");
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
      case Tag::AS_TENSOR: return define(argument.get_as_tensor().get_name(), ValueKind::Tensor, -1, scope);
      case Tag::AS_SYM_INT:
        if (argument.get_as_sym_int().tag() == schema::SymIntArgument::Tag::AS_NAME) {
          return define(argument.get_as_sym_int().get_as_name(), ValueKind::Int, -1, scope);
        }
        return fix(argument.get_as_sym_int().get_as_int());
      case Tag::AS_SYM_FLOAT:
        if (argument.get_as_sym_float().tag() == schema::SymFloatArgument::Tag::AS_NAME) {
          return define(argument.get_as_sym_float().get_as_name(), ValueKind::Float, -1, scope);
        }
        return fix(argument.get_as_sym_float().get_as_float().get());
      case Tag::AS_SYM_BOOL:
        if (argument.get_as_sym_bool().tag() == schema::SymBoolArgument::Tag::AS_NAME) {
          return define(argument.get_as_sym_bool().get_as_name(), ValueKind::Bool, -1, scope);
        }
        return fix(argument.get_as_sym_bool().get_as_bool());
      default: {
        const Operand operand = operand_of(argument, scope);
        if (!operand.is_constant()) throw ProgramError("is of a kind that cannot be an input.");
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

  // "L__self__blocks.0.linear1@1,blocks.0.linear1,torch.nn.modules.linear.Linear;…", outermost first.
  int read_call(const std::string& stack) {
    int call = -1;
    std::string_view rest = stack;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find(';'), rest.size());
      const std::string_view entry = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      const std::size_t first = entry.find(',');
      const std::size_t second = first == std::string_view::npos ? first : entry.find(',', first + 1);
      if (second == std::string_view::npos) continue;
      const std::string_view path = entry.substr(first + 1, second - first - 1);
      // What passes over the graph has put there, not the model.
      if (path.starts_with("_empty_nn_module_stack")) continue;
      const std::string key = std::to_string(call).append(" ").append(entry.substr(0, first));
      const auto [found, is_new] = calls_.try_emplace(key, static_cast<int>(graph().calls.size()));
      if (is_new) {
        graph().calls.push_back(
            {.path = std::string(path), .type = std::string(entry.substr(second + 1)), .parent = call});
      }
      call = found->second;
    }
    return call;
  }

  void read_nodes(const json& graph, Scope& scope, int region) {
    int index = 0;
    for (const json& node : graph.at("nodes")) {
      std::string place = "node " + std::to_string(index++);
      if (node.contains("name") && node["name"].is_string()) place += " '" + node["name"].get<std::string>() + "'";
      at(place, [&] { read_node(node, scope, region); });
    }
  }

  void read_node(const json& described, Scope& scope, int region) {
    const auto target = described.at("target").get<std::string>();
    if (target == "torch.ops.pippy._pipe_split.default") {
      graph().marks.push_back(static_cast<int>(graph().nodes.size()));
      return;
    }
    constexpr std::string_view higher_order = "torch.ops.higher_order.";
    if (target.starts_with(higher_order)) {
      read_region(described, target.substr(higher_order.size()), scope, region);
      return;
    }
    const auto read = described.get<schema::Node>();
    Node node{.target = target, .function = Arithmetic(nullptr), .region = region};
    node.name = read.get_name().value_or("");
    const auto stack = read.get_metadata().find("nn_module_stack");
    if (stack != read.get_metadata().end()) node.call = read_call(stack->second);
    const auto function = find_function(target);
    if (!function) {
      throw ProgramError(
          describe(graph(), node) +
          ": there is no such operator in this process.\n  Hint: an operator of another library is there "
          "once that is loaded; one of another version of PyTorch has to be exported with 2.13.");
    }
    node.function = *function;
    node.operands = operands_of(read, node, scope);
    const int number = static_cast<int>(graph().nodes.size());
    for (const schema::Argument& output : read.get_outputs()) {
      const Operand* written = written_operand(node, node.results.size());
      if (written != nullptr && output.tag() == schema::Argument::Tag::AS_TENSOR) {
        // The very tensor that was written to.
        scope.emplace(output.get_as_tensor().get_name(), *written);
        node.results.push_back({.values = {-1}});
      } else {
        node.results.push_back(result_of(output, number, scope));
      }
    }
    check_results(node);
    graph().nodes.push_back(std::move(node));
  }

  std::vector<Operand> operands_of(const schema::Node& read, const Node& node, const Scope& scope) {
    std::vector<Operand> operands;
    if (!node.is_operator()) {
      for (const schema::NamedArgument& input : read.get_inputs()) {
        Operand operand = operand_of(input.get_arg(), scope);
        // Some take a list of numbers.
        if (operand.list == Operand::ListKind::None) {
          operands.push_back(std::move(operand));
        } else {
          std::move(operand.elements.begin(), operand.elements.end(), std::back_inserter(operands));
        }
      }
      return operands;
    }
    const c10::FunctionSchema& signature = std::get<c10::OperatorHandle>(node.function).schema();
    const std::vector<c10::Argument>& arguments = signature.arguments();
    std::vector<std::optional<Operand>> given(arguments.size());
    std::size_t position = 0;
    for (const schema::NamedArgument& input : read.get_inputs()) {
      const std::string& name = input.get_name();
      std::size_t index = position++;
      if (!name.empty()) {
        const auto found = std::find_if(arguments.begin(), arguments.end(),
                                        [&](const c10::Argument& argument) { return argument.name() == name; });
        index = static_cast<std::size_t>(found - arguments.begin());
      }
      if (index >= arguments.size() || given[index]) {
        throw ProgramError(describe(graph(), node) + ": " + toString(signature) + " has no argument '" + name +
                           "' at this place.");
      }
      given[index] = adapted(operand_of(input.get_arg(), scope), arguments[index]);
      if (!fits(*given[index], *arguments[index].type(), graph())) {
        throw ProgramError(describe(graph(), node) + ": its argument '" + arguments[index].name() + "' should be " +
                           arguments[index].type()->str() + ".");
      }
    }
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (!given[i] && !arguments[i].default_value()) {
        throw ProgramError(describe(graph(), node) + ": its argument '" + arguments[i].name() + "' is missing.");
      }
      operands.push_back(given[i] ? std::move(*given[i]) : constant(*arguments[i].default_value()));
    }
    return operands;
  }

  // The operand that an operator in place writes to and gives back as a result; null for other results.
  static const Operand* written_operand(const Node& node, std::size_t result) {
    const auto* handle = std::get_if<c10::OperatorHandle>(&node.function);
    if (handle == nullptr || result >= handle->schema().returns().size()) return nullptr;
    const c10::AliasInfo* given = handle->schema().returns()[result].alias_info();
    if (given == nullptr || !given->isWrite()) return nullptr;
    const auto& arguments = handle->schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* taken = arguments[i].alias_info();
      const bool same = taken != nullptr && taken->isWrite() && taken->beforeSets() == given->beforeSets();
      if (same && node.operands[i].is_value()) return &node.operands[i];
    }
    return nullptr;
  }

  Node::Result result_of(const schema::Argument& output, int producer, Scope& scope) {
    using Tag = schema::Argument::Tag;
    const auto tensor = [&](const schema::TensorArgument& one) {
      return define(one.get_name(), ValueKind::Tensor, producer, scope);
    };
    switch (output.tag()) {
      case Tag::AS_NONE: return {.values = {-1}};
      case Tag::AS_TENSOR: return {.values = {tensor(output.get_as_tensor())}};
      case Tag::AS_TENSORS: {
        Node::Result result{.is_list = true};
        for (const schema::TensorArgument& one : output.get_as_tensors()) result.values.push_back(tensor(one));
        return result;
      }
      case Tag::AS_OPTIONAL_TENSOR: {
        const schema::OptionalTensorArgument& one = output.get_as_optional_tensor();
        if (one.tag() == schema::OptionalTensorArgument::Tag::AS_NONE) return {.values = {-1}};
        return {.values = {tensor(one.get_as_tensor())}};
      }
      case Tag::AS_OPTIONAL_TENSORS: {
        Node::Result result{.is_list = true};
        for (const schema::OptionalTensorArgument& one : output.get_as_optional_tensors()) {
          const bool none = one.tag() == schema::OptionalTensorArgument::Tag::AS_NONE;
          result.values.push_back(none ? -1 : tensor(one.get_as_tensor()));
        }
        return result;
      }
      case Tag::AS_SYM_INT:
        if (output.get_as_sym_int().tag() == schema::SymIntArgument::Tag::AS_INT) return {.values = {-1}};
        return {.values = {define(output.get_as_sym_int().get_as_name(), ValueKind::Int, producer, scope)}};
      case Tag::AS_SYM_INTS: {
        Node::Result result{.is_list = true};
        for (const schema::SymIntArgument& one : output.get_as_sym_ints()) {
          const bool fixed = one.tag() == schema::SymIntArgument::Tag::AS_INT;
          result.values.push_back(fixed ? -1 : define(one.get_as_name(), ValueKind::Int, producer, scope));
        }
        return result;
      }
      case Tag::AS_SYM_FLOAT:
        if (output.get_as_sym_float().tag() == schema::SymFloatArgument::Tag::AS_FLOAT) return {.values = {-1}};
        return {.values = {define(output.get_as_sym_float().get_as_name(), ValueKind::Float, producer, scope)}};
      case Tag::AS_SYM_BOOL:
        if (output.get_as_sym_bool().tag() == schema::SymBoolArgument::Tag::AS_BOOL) return {.values = {-1}};
        return {.values = {define(output.get_as_sym_bool().get_as_name(), ValueKind::Bool, producer, scope)}};
      default: throw ProgramError("gives something of a kind that cannot be read.");
    }
  }

  void check_results(Node& node) {
    if (!node.is_operator()) {
      const bool one = node.results.size() == 1 && !node.results.front().is_list;
      if (!one) throw ProgramError(describe(graph(), node) + ": arithmetic gives one number.");
      return;
    }
    const auto& returns = std::get<c10::OperatorHandle>(node.function).schema().returns();
    // What gives nothing that is used may be said to give None, or nothing at all.
    const bool unused = std::all_of(node.results.begin(), node.results.end(), [](const Node::Result& result) {
      return std::all_of(result.values.begin(), result.values.end(), [](int value) { return value < 0; });
    });
    if (unused) {
      node.results.assign(returns.size(), {});
      return;
    }
    if (node.results.size() != returns.size()) {
      throw ProgramError(describe(graph(), node) + ": has " + std::to_string(node.results.size()) +
                         " results, and the operator gives " + std::to_string(returns.size()) + ".");
    }
    for (std::size_t i = 0; i < returns.size(); ++i) {
      const bool is_list = returns[i].type()->kind() == c10::TypeKind::ListType;
      const bool used = !node.results[i].values.empty();
      if (used && is_list != node.results[i].is_list) {
        throw ProgramError(describe(graph(), node) + ": its result " + std::to_string(i) + " should be " +
                           returns[i].type()->str() + ".");
      }
    }
  }

  // A region is a graph inside of the graph. Its nodes become nodes of the whole, with what holds for them.
  void read_region(const json& described, const std::string& name, Scope& scope, int region) {
    const auto& inputs = described.at("inputs");
    Region inner = graph().regions[static_cast<std::size_t>(region)];
    std::size_t at_graph = 0;
    const auto argument = [&](std::size_t index) {
      if (index >= inputs.size()) throw ProgramError("the region " + name + " has too few arguments.");
      return operand_of(inputs[index].at("arg").get<schema::Argument>(), scope);
    };
    if (name == "wrap_with_set_grad_enabled") {
      const Operand enabled = argument(0);
      if (!enabled.is_constant() || !enabled.constant.isBool()) throw ProgramError("grad mode is on or off.");
      inner.grad = enabled.constant.toBool();
      at_graph = 1;
    } else if (name == "wrap_with_autocast") {
      Region::Autocast autocast;
      const Operand device = argument(0);
      const Operand dtype = argument(1);
      const Operand enabled = argument(2);
      if (!device.constant.isString() || !enabled.constant.isBool() ||
          !(dtype.constant.isInt() || dtype.constant.isNone())) {
        throw ProgramError("autocast wants a device, a dtype and whether it is on.");
      }
      schema::Device named;
      named.set_type(device.constant.toStringRef());
      autocast.device = device_of(named).type();
      if (dtype.constant.isInt()) autocast.dtype = static_cast<at::ScalarType>(dtype.constant.toInt());
      autocast.enabled = enabled.constant.toBool();
      inner.autocast = autocast;
      at_graph = 4;
    } else {
      Node node{.target = "torch.ops.higher_order." + name, .function = Arithmetic(nullptr)};
      if (described.contains("name") && described["name"].is_string()) node.name = described["name"];
      const json metadata = described.value("metadata", json::object());
      if (metadata.contains("nn_module_stack")) node.call = read_call(metadata["nn_module_stack"]);
      throw ProgramError(describe(graph(), node) +
                         ": is a higher-order operator, of which regions of grad mode and of autocast can be run.");
    }
    if (at_graph >= inputs.size() || !inputs[at_graph].at("arg").contains("as_graph")) {
      throw ProgramError("the region " + name + " has no graph.");
    }
    const json& body = inputs[at_graph].at("arg").at("as_graph").at("graph");
    Scope inside;
    std::size_t next = at_graph + 1;
    for (const json& input : body.at("inputs")) {
      inside.emplace(name_of(input.get<schema::Argument>()), argument(next++));
    }
    declare(body, inside);
    read_nodes(body, inside, number_of(inner));
    declared_.pop_back();
    bind_outputs(described.at("outputs"), body.at("outputs"), inside, scope);
  }

  // What comes out of a region, under the names that it has outside.
  void bind_outputs(const json& outer, const json& inner, const Scope& inside, Scope& scope) {
    std::vector<Operand> results;
    for (const json& output : inner) results.push_back(operand_of(output.get<schema::Argument>(), inside));
    std::vector<std::string> names;
    for (const json& output : outer) {
      const auto argument = output.get<schema::Argument>();
      if (argument.tag() == schema::Argument::Tag::AS_TENSORS) {
        for (const schema::TensorArgument& one : argument.get_as_tensors()) names.push_back(one.get_name());
      } else {
        names.push_back(name_of(argument));
      }
    }
    if (names.size() != results.size()) throw ProgramError("a region gives another number of values than are taken.");
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (!names[i].empty()) scope.emplace(names[i], results[i]);
    }
  }

  int number_of(const Region& region) {
    std::vector<Region>& regions = graph().regions;
    const auto found = std::find(regions.begin(), regions.end(), region);
    const auto number = static_cast<int>(found - regions.begin());
    if (found == regions.end()) regions.push_back(region);
    return number;
  }

  void read_outputs(const schema::GraphSignature& signature, const Scope& scope) {
    std::size_t users = 0;
    std::size_t index = 0;
    for (const schema::OutputSpec& spec : signature.get_output_specs()) {
      at("output " + std::to_string(index++), [&] {
        ProgramOutput output = output_of(spec, scope);
        if (output.kind == ProgramOutput::Kind::User) ++users;
        exported_->outputs.push_back(std::move(output));
      });
    }
    if (users != exported_->out_spec.leaves()) {
      fail("there are " + std::to_string(users) + " outputs, and the structure of the outputs has " +
           std::to_string(exported_->out_spec.leaves()) + ".");
    }
  }

  ProgramOutput output_of(const schema::OutputSpec& spec, const Scope& scope) {
    using Tag = schema::OutputSpec::Tag;
    switch (spec.tag()) {
      case Tag::USER_OUTPUT: {
        Operand operand = operand_of(spec.get_user_output().get_arg(), scope);
        if (operand.list != Operand::ListKind::None) throw ProgramError("is a list, and should be one value.");
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
            "is a gradient: the program has its backward in it.\n  Hint: export the forward alone; its "
            "gradients are computed here.");
      case Tag::TOKEN: throw ProgramError("is a token of an operator with side effects, which cannot be run.");
    }
    throw ProgramError("is of an unknown kind.");
  }

  std::string written(ProgramInput::Kind kind, const std::string& name) const {
    const bool there = std::any_of(exported_->inputs.begin(), exported_->inputs.end(),
                                   [&](const ProgramInput& input) { return input.kind == kind && input.name == name; });
    if (!there) throw ProgramError("is written to '" + name + "', which there is not.");
    return name;
  }

  std::string user_input(const std::string& name, const Scope& scope) const {
    const Operand& operand = look_up(name, scope);
    for (const ProgramInput& input : exported_->inputs) {
      if (input.kind == ProgramInput::Kind::User && input.value == operand.value) return input.name;
    }
    throw ProgramError("is written to '" + name + "', which is no input.");
  }

  std::string where_;
  Exported* exported_;
  std::unordered_map<std::string, int> calls_;
  // Of the graph that is read and those around it.
  std::vector<Declared> declared_;
};

void check_version(const json& program, const std::string& where) {
  const json version = program.value("schema_version", json::object());
  const json major = version.is_object() ? version.value("major", json()) : json();
  if (!major.is_number_integer()) throw ProgramError(where + ": has no schema_version.");
  if (major != kSchemaMajor) {
    throw ProgramError(where + ": is of schema version " + major.dump() + "; version " + std::to_string(kSchemaMajor) +
                       " can be read.\n  Hint: export the model with PyTorch 2.13.");
  }
}

}  // namespace

Exported read_exported(const Archive& archive) {
  if (archive.contains("byteorder") && archive.text("byteorder") != "little") {
    throw ProgramError(archive.name() + ": was written on a machine with another order of bytes.");
  }
  const std::string record = "models/" + model_name(archive) + ".json";
  const std::string where = archive.name() + ": " + record;
  const json program = parse_json(archive.text(record), where);
  Exported exported;
  try {
    if (!program.is_object()) throw ProgramError(where + ": should be an object.");
    check_version(program, where);
    for (const auto& [symbol, range] : program.at("range_constraints").items()) {
      const auto constraint = range.get<schema::RangeConstraint>();
      SymbolRange& known = exported.ranges[symbol];
      known.least = constraint.get_min_val().value_or(known.least);
      known.most = constraint.get_max_val().value_or(known.most);
    }
    Reader(where, exported).read(program.at("graph_module"));
  } catch (const json::exception& error) {
    throw ProgramError(where + ": is not as the schema has it: " + error.what());
  }
  return exported;
}

}  // namespace penstock
