#include "penstock/program/reader/graph_reader.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "penstock/base/text.h"
#include "penstock/program/interpreter/operators.h"
#include "penstock/program/reader/schema.h"

namespace penstock::internal {
namespace {

using nlohmann::json;

at::ScalarType autocast_dtype(std::int64_t code) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    if (code == static_cast<std::int64_t>(dtype)) return dtype;
  }
  throw ProgramError("autocast expects a floating-point dtype.");
}

// Returns the operand that an in-place operator writes to and returns as this result; null for any other result.
const Operand* written_operand(const Node& node, std::size_t result) {
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

// Gives the outputs of a region the names that they have in the enclosing graph.
void bind_outputs(const json& outer, const json& inner, const Scope& inside, Scope& scope) {
  std::vector<Operand> results;
  for (const json& output : inner) results.push_back(operand_of(output.get<schema::Argument>(), inside));
  std::vector<std::string> names;
  for (const json& output : outer) {
    const auto argument = output.get<schema::Argument>();
    if (argument.tag() == schema::Argument::Tag::AS_TENSORS) {
      for (const schema::TensorArgument& tensor : argument.get_as_tensors()) names.push_back(tensor.get_name());
    } else {
      names.push_back(name_of(argument));
    }
  }
  if (names.size() != results.size())
    throw ProgramError(concat("a region returns ", results.size(), " values, expected ", names.size(), "."));
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (!names[i].empty()) introduce(names[i], results[i], scope);
  }
}

}  // namespace

void GraphReader::declare(const json& graph) {
  declared_.emplace_back();
  for (const auto& item : graph.at("tensor_values").items()) {
    at(concat("value '", item.key(), "'"),
       [&] { declared_.back().emplace(item.key(), type_of(item.value().get<schema::TensorMeta>())); });
  }
}

int GraphReader::define(const std::string& name, ValueKind kind, int producer, Scope& scope) {
  Value made{.name = name, .kind = kind, .producer = producer};
  const auto& tensors = declared_.back();
  if (const auto found = tensors.find(name); found != tensors.end()) made.type = found->second;
  graph_->values.push_back(std::move(made));
  const int value = static_cast<int>(graph_->values.size()) - 1;
  introduce(name, {.value = value}, scope);
  return value;
}

int GraphReader::read_call(const std::string& stack) {
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
    // Entries that graph passes have added are not modules of the model.
    if (path.starts_with("_empty_nn_module_stack")) continue;
    const std::string key = concat(call, " ", entry.substr(0, first));
    const auto [found, is_new] = calls_.try_emplace(key, static_cast<int>(graph_->calls.size()));
    if (is_new) {
      graph_->calls.push_back(
          {.path = std::string(path), .type = std::string(entry.substr(second + 1)), .parent = call});
    }
    call = found->second;
  }
  return call;
}

void GraphReader::read_nodes(const json& graph, Scope& scope, int region) {
  int index = 0;
  for (const json& node : graph.at("nodes")) {
    std::string place = concat("node ", index++);
    if (node.contains("name") && node["name"].is_string()) place += concat(" '", node["name"].get<std::string>(), "'");
    at(place, [&] { read_node(node, scope, region); });
  }
}

void GraphReader::read_node(const json& described, Scope& scope, int region) {
  const auto target = described.at("target").get<std::string>();
  if (target == "torch.ops.pippy._pipe_split.default") {
    graph_->marks.push_back(static_cast<int>(graph_->nodes.size()));
    return;
  }
  constexpr std::string_view kHigherOrder = "torch.ops.higher_order.";
  if (target.starts_with(kHigherOrder)) {
    read_region(described, target.substr(kHigherOrder.size()), scope, region);
    return;
  }
  const auto read = described.get<schema::Node>();
  Node node{.target = target, .function = Arithmetic(nullptr), .region = region};
  node.name = read.get_name().value_or("");
  const auto stack = read.get_metadata().find("nn_module_stack");
  if (stack != read.get_metadata().end()) node.call = read_call(stack->second);
  const auto function = find_function(target);
  if (!function) {
    throw ProgramError(describe(*graph_, node) +
                       (target.starts_with("torch._functorch.")
                            ? ": is a function transform, such as vmap, which only Python can run."
                            : ": there is no such operator in this process.\n  Hint: load the library that registers "
                              "it, or export the model again with PyTorch 2.13."));
  }
  if (const auto* handle = std::get_if<c10::OperatorHandle>(&*function)) {
    const c10::OperatorName& name = handle->operator_name();
    if (!allowed_->contains(name)) {
      throw ProgramError(
          concat(describe(*graph_, node),
                 ": is not an operator that programs may call: those only compute on their arguments.\n  Hint: if you "
                 "trust this model and ",
                 c10::toString(name), ", add it to ProgramOptions::allowed_operators."));
    }
  }
  node.function = *function;
  node.operands = operands_of(read, node, scope);
  const int number = static_cast<int>(graph_->nodes.size());
  for (const schema::Argument& output : read.get_outputs()) {
    const Operand* written = written_operand(node, node.results.size());
    if (written != nullptr && output.tag() == schema::Argument::Tag::AS_TENSOR) {
      // An in-place operator returns the tensor that it wrote to.
      introduce(output.get_as_tensor().get_name(), *written, scope);
      node.results.push_back({.values = {-1}});
    } else {
      node.results.push_back(result_of(output, number, scope));
    }
  }
  check_results(node);
  // `buffer += 1` is exported with a copy of the buffer to itself. It is dropped: autograd would count another write.
  const bool copies_to_itself = node.operator_name() == "aten::copy_" && node.operands[0].is_value() &&
                                node.operands[1].is_value() && node.operands[0].value == node.operands[1].value;
  if (!copies_to_itself) graph_->nodes.push_back(std::move(node));
}

std::vector<Operand> GraphReader::operands_of(const schema::Node& read, const Node& node, const Scope& scope) {
  std::vector<Operand> operands;
  if (!node.is_operator()) {
    for (const schema::NamedArgument& input : read.get_inputs()) {
      Operand operand = operand_of(input.get_arg(), scope);
      // Functions such as sym_max take a list of numbers.
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
      throw ProgramError(concat(describe(*graph_, node), ": ", toString(signature), " has no argument '", name,
                                "' at this position."));
    }
    given[index] = adapted(operand_of(input.get_arg(), scope), arguments[index]);
    if (!fits(*given[index], *arguments[index].type(), *graph_)) {
      throw ProgramError(concat(describe(*graph_, node), ": its argument '", arguments[index].name(), "' should be ",
                                arguments[index].type()->str(), "."));
    }
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!given[i] && !arguments[i].default_value()) {
      throw ProgramError(concat(describe(*graph_, node), ": its argument '", arguments[i].name(), "' is missing."));
    }
    operands.push_back(given[i] ? std::move(*given[i]) : constant(*arguments[i].default_value()));
  }
  return operands;
}

Node::Result GraphReader::result_of(const schema::Argument& output, int producer, Scope& scope) {
  using Tag = schema::Argument::Tag;
  const auto tensor = [&](const schema::TensorArgument& argument) {
    return define(argument.get_name(), ValueKind::Tensor, producer, scope);
  };
  switch (output.tag()) {
    case Tag::AS_NONE: return {.values = {-1}};
    case Tag::AS_TENSOR: return {.values = {tensor(output.get_as_tensor())}};
    case Tag::AS_TENSORS: {
      Node::Result result{.is_list = true};
      for (const schema::TensorArgument& element : output.get_as_tensors()) result.values.push_back(tensor(element));
      return result;
    }
    case Tag::AS_OPTIONAL_TENSOR: {
      const schema::OptionalTensorArgument& element = output.get_as_optional_tensor();
      if (element.tag() == schema::OptionalTensorArgument::Tag::AS_NONE) return {.values = {-1}};
      return {.values = {tensor(element.get_as_tensor())}};
    }
    case Tag::AS_OPTIONAL_TENSORS: {
      Node::Result result{.is_list = true};
      for (const schema::OptionalTensorArgument& element : output.get_as_optional_tensors()) {
        const bool none = element.tag() == schema::OptionalTensorArgument::Tag::AS_NONE;
        result.values.push_back(none ? -1 : tensor(element.get_as_tensor()));
      }
      return result;
    }
    case Tag::AS_SYM_INT:
      if (output.get_as_sym_int().tag() == schema::SymIntArgument::Tag::AS_INT) return {.values = {-1}};
      return {.values = {define(output.get_as_sym_int().get_as_name(), ValueKind::Int, producer, scope)}};
    case Tag::AS_SYM_INTS: {
      Node::Result result{.is_list = true};
      for (const schema::SymIntArgument& element : output.get_as_sym_ints()) {
        const bool fixed = element.tag() == schema::SymIntArgument::Tag::AS_INT;
        result.values.push_back(fixed ? -1 : define(element.get_as_name(), ValueKind::Int, producer, scope));
      }
      return result;
    }
    case Tag::AS_SYM_FLOAT:
      if (output.get_as_sym_float().tag() == schema::SymFloatArgument::Tag::AS_FLOAT) return {.values = {-1}};
      return {.values = {define(output.get_as_sym_float().get_as_name(), ValueKind::Float, producer, scope)}};
    case Tag::AS_SYM_BOOL:
      if (output.get_as_sym_bool().tag() == schema::SymBoolArgument::Tag::AS_BOOL) return {.values = {-1}};
      return {.values = {define(output.get_as_sym_bool().get_as_name(), ValueKind::Bool, producer, scope)}};
    default: throw ProgramError("has a result of a kind that is not supported.");
  }
}

void GraphReader::check_results(Node& node) {
  if (!node.is_operator()) {
    const bool is_single = node.results.size() == 1 && !node.results.front().is_list;
    if (!is_single) throw ProgramError(describe(*graph_, node) + ": arithmetic returns one number.");
    return;
  }
  const auto& returns = std::get<c10::OperatorHandle>(node.function).schema().returns();
  // For an operator whose results are unused, exports have None or no result at all.
  const bool unused = std::all_of(node.results.begin(), node.results.end(), [](const Node::Result& result) {
    return std::all_of(result.values.begin(), result.values.end(), [](int value) { return value < 0; });
  });
  if (unused) {
    node.results.assign(returns.size(), {});
    return;
  }
  if (node.results.size() != returns.size()) {
    throw ProgramError(concat(describe(*graph_, node), ": found ", node.results.size(),
                              " results, and the operator returns ", returns.size(), "."));
  }
  for (std::size_t i = 0; i < returns.size(); ++i) {
    const bool is_list = returns[i].type()->kind() == c10::TypeKind::ListType;
    const bool used = !node.results[i].values.empty();
    if (used && is_list != node.results[i].is_list) {
      throw ProgramError(
          concat(describe(*graph_, node), ": its result ", i, " should be ", returns[i].type()->str(), "."));
    }
  }
}

void GraphReader::read_region(const json& described, const std::string& name, Scope& scope, int region) {
  const auto& inputs = described.at("inputs");
  Region inner = graph_->regions[static_cast<std::size_t>(region)];
  std::size_t body_index = 0;
  const auto argument = [&](std::size_t index) {
    if (index >= inputs.size()) throw ProgramError(concat("the region ", name, " has too few arguments."));
    return operand_of(inputs[index].at("arg").get<schema::Argument>(), scope);
  };
  if (name == "wrap_with_set_grad_enabled") {
    const Operand enabled = argument(0);
    if (!enabled.is_constant() || !enabled.constant.isBool()) throw ProgramError("grad mode should be a bool.");
    inner.grad = enabled.constant.toBool();
    body_index = 1;
  } else if (name == "wrap_with_autocast") {
    Region::Autocast autocast;
    const Operand device = argument(0);
    const Operand dtype = argument(1);
    const Operand enabled = argument(2);
    if (!device.constant.isString() || !enabled.constant.isBool() ||
        !(dtype.constant.isInt() || dtype.constant.isNone())) {
      throw ProgramError("autocast expects a device, a dtype and a bool.");
    }
    schema::Device named;
    named.set_type(device.constant.toStringRef());
    autocast.device = device_of(named).type();
    if (dtype.constant.isInt()) autocast.dtype = autocast_dtype(dtype.constant.toInt());
    autocast.enabled = enabled.constant.toBool();
    inner.autocast = autocast;
    body_index = 4;
  } else {
    Node node{.target = "torch.ops.higher_order." + name, .function = Arithmetic(nullptr)};
    if (described.contains("name") && described["name"].is_string()) node.name = described["name"];
    const json metadata = described.value("metadata", json::object());
    if (metadata.contains("nn_module_stack")) node.call = read_call(metadata["nn_module_stack"]);
    throw ProgramError(describe(*graph_, node) +
                       ": is a higher-order operator; only regions of grad mode and of autocast are supported.");
  }
  if (body_index >= inputs.size() || !inputs[body_index].at("arg").contains("as_graph")) {
    throw ProgramError(concat("the region ", name, " has no graph."));
  }
  const json& body = inputs[body_index].at("arg").at("as_graph").at("graph");
  Scope inside;
  std::size_t next = body_index + 1;
  for (const json& input : body.at("inputs")) {
    inside.emplace(name_of(input.get<schema::Argument>()), argument(next++));
  }
  declare(body);
  read_nodes(body, inside, index_of(inner));
  declared_.pop_back();
  bind_outputs(described.at("outputs"), body.at("outputs"), inside, scope);
}

int GraphReader::index_of(const Region& region) {
  std::vector<Region>& regions = graph_->regions;
  const auto found = std::find(regions.begin(), regions.end(), region);
  const auto index = static_cast<int>(found - regions.begin());
  if (found == regions.end()) regions.push_back(region);
  return index;
}

}  // namespace penstock::internal
